"""cuda_graph(): torch.cuda.graph with a managed pool.

torch cannot attach an allocator to a pool that somebody named with a token, so each token is mapped to a pool of ours at its
first use, by tag, what becomes of contents, and device, and later captures with that token share it. Such a pool lives as
long as a graph captured with it: replays use its memory, and torch does not know which of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver.eager import eager_methods
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.frames import FunctionDecorator
from torch_memory_saver.pools import Key, Pool, PoolStore
from torch_memory_saver.torch_layer import PoolId, TorchCuda

__all__ = ["GraphCapture", "GraphPools"]

logger = logging.getLogger("torch_memory_saver")


class _SharedPool:
    """A pool of ours that captures use, and how many graphs and captures under way need it."""

    __slots__ = ("pool", "token", "users")

    def __init__(self, pool: Pool, token: PoolId | None) -> None:
        self.pool = pool
        self.token = token
        self.users = 0


class GraphPools:
    """The pools that captured graphs use. Its lock is like the store's: never held across a call of torch."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self.warned_of_nccl = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._by_token: dict[tuple[PoolId, Key], _SharedPool] = {}
        self._by_id: dict[PoolId, _SharedPool] = {}
        self._streams: dict[int, Any] = {}

    after_fork_in_child = _reset

    def acquire(self, torch: TorchCuda, token: PoolId | None, key: Key) -> _SharedPool:
        """The pool for a capture, with one more user.

        Raises:
            InvalidStateError: The token already has memory that is not managed, or its pool is paused.
        """
        with self._lock:
            shared = self._find(token, key)
            if shared is not None:
                shared.users += 1
        if shared is None:
            return self._create(torch, token, key)
        paused, epoch = _core.tag_info(key[0])
        if paused and shared.pool.epoch != epoch:
            self.release(shared)
            raise InvalidStateError(
                f"the memory of this graph pool may be paused: resume tag {key[0]!r} before capturing into it again",
                operation="cuda_graph",
                tag=key[0],
            )
        shared.pool.epoch = epoch
        return shared

    def _find(self, token: PoolId | None, key: Key) -> _SharedPool | None:
        if token is None:
            return None
        own = self._by_id.get(token)
        if own is not None and own.pool.key == key:
            return own
        return self._by_token.get((token, key))

    def _create(self, torch: TorchCuda, token: PoolId | None, key: Key) -> _SharedPool:
        if token is not None and token not in self._by_id and torch.segments(token):
            raise InvalidStateError(
                f"graph pool {token} already holds memory that is not managed: give cuda_graph() a token that only "
                "cuda_graph() has used, or none",
                operation="cuda_graph",
                tag=key[0],
            )
        pool = self._store.make_pool(torch, key)
        pool.epoch = _core.tag_info(key[0])[1]
        shared = _SharedPool(pool, token)
        with self._lock:
            other = self._find(token, key)
            if other is None:
                shared.users = 1
                self._by_id[pool.id] = shared
                if token is not None:
                    self._by_token[token, key] = shared
                return shared
            other.users += 1
        self._store.retire(torch, pool)
        return other

    def capture_stream(self, torch: TorchCuda, device: int) -> Any:
        """The stream for captures that name none. torch's is on the device of the process's first capture: None if that is
        this one, which leaves the choice to torch."""
        default = getattr(torch.torch.cuda.graph, "default_capture_stream", None)
        if default is None or default.device_index == device:
            return None
        if device not in self._streams:
            self._streams[device] = torch.torch.cuda.Stream(device)
        return self._streams[device]

    def release(self, shared: _SharedPool) -> None:
        """One user less; the last one gives the pool up. Runs in finalizers, too, and so calls nothing of torch."""
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            self._by_id.pop(shared.pool.id, None)
            if shared.token is not None:
                self._by_token.pop((shared.token, shared.pool.key), None)
        self._store.retire_later(shared.pool)

    def keep_with(self, graph: Any, shared: _SharedPool) -> None:
        """The user that the capture was becomes the graph that it made."""
        # At exit the pool stays: it is immortal then.
        weakref.finalize(graph, self.release, shared).atexit = False


@eager_methods
class GraphCapture(FunctionDecorator):
    """What cuda_graph() returns."""

    def __init__(
        self,
        store: PoolStore,
        pools: GraphPools,
        torch: TorchCuda,
        graph: Any,
        token: PoolId | None,
        stream: Any,
        capture_error_mode: str,
        tag: str,
        backup: int,
        host_policy: int = _core.HOST_DEFAULT,
    ) -> None:
        self._store = store
        self._pools = pools
        self._torch = torch
        self._graph = graph
        self._token = token
        self._stream = stream
        self._capture_error_mode = capture_error_mode
        self._tag = tag
        self._backup = backup
        self._host_policy = host_policy

    def __enter__(self) -> None:
        torch = self._torch
        device = torch.current_device() if self._stream is None else self._stream.device_index
        _warn_of_nccl(self._pools)
        # torch empties its cache before a capture, which does nothing while this thread is in a region.
        self._store.empty_cache(torch)
        self._shared = self._pools.acquire(torch, self._token, (self._tag, self._backup, device, self._host_policy))
        stream = self._pools.capture_stream(torch, device) if self._stream is None else self._stream
        stream_before = torch.torch.cuda.current_stream()
        # While the capture runs its pool is the only one that this thread routes: first torch allocates what belongs to the
        # device's random generator, for all graphs to come, and that must not be paused with any tag.
        self._around = contextlib.ExitStack()
        self._around.enter_context(self._store.routing_suspended(torch))
        self._around.enter_context(torch.capturing_into(self._shared.pool.memory_pool))
        level = 0
        capturing = False
        try:
            # Not managed: allocations outside the pool are ordinary. Those of the pool get these settings anyway.
            level = _core.region_enter(self._tag, self._backup, False, self._host_policy)
            _core.capture_begin(self._tag, self._backup, self._host_policy)
            capturing = True
            self._capture = torch.torch.cuda.graph(
                self._graph, pool=self._shared.pool.id, stream=stream, capture_error_mode=self._capture_error_mode
            )
            self._capture.__enter__()
        except BaseException:
            torch.torch.cuda.set_stream(stream_before)
            self._leave(level, capturing)
            self._pools.release(self._shared)
            raise
        self._level = level

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        captured = False
        try:
            self._capture.__exit__(exception_type, exception, traceback)
            captured = True
        finally:
            self._leave(self._level, capturing=True)
            if captured:
                self._pools.keep_with(self._graph, self._shared)
            else:
                self._pools.release(self._shared)

    def _leave(self, level: int, capturing: bool) -> None:
        if capturing:
            _core.capture_end()
        if level:
            _core.region_leave(level)
        self._around.close()


def check_token(token: object) -> PoolId | None:
    """A pool token of torch's: a pair of ints."""
    if token is None:
        return None
    if isinstance(token, (tuple, list)) and len(token) == 2 and all(isinstance(part, int) for part in token):
        return (int(token[0]), int(token[1]))
    raise InvalidArgumentError(
        "pool must be a token from torch.cuda.graph_pool_handle() or from a graph's or MemPool's id, or None, "
        f"not {type(token).__name__}: {token!r}"
    )


def _warn_of_nccl(pools: GraphPools) -> None:
    """One warning where collectives in this graph would keep addresses of physical memory that a pause gives back."""
    if pools.warned_of_nccl or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    backends = f"{distributed.get_backend()} {getattr(distributed, 'get_backend_config', lambda: '')()}"
    if "nccl" in backends.lower():
        pools.warned_of_nccl = True
        logger.warning(
            "NCCL registers the physical memory of captured graphs, and a pause gives that memory back: graphs with "
            "collectives may hang after a resume. Set NCCL_GRAPH_REGISTER=0 before NCCL is initialised."
        )
