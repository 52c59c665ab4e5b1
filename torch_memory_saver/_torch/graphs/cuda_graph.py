"""cuda_graph(): torch.cuda.graph with a managed pool.

A capture uses the pool of the program's token, which torch owns, if torch's allocations in that pool are managed:

- preloaded, in any pool: inside the capture a region's settings are in force, and torch calls our functions in place of
  cudaMalloc and, for expandable segments, of the driver's virtual memory management;
- otherwise in a pool with our allocator. torch makes the pool of a bare token (``graph_pool_handle()``) at its first use,
  and no allocator can be attached to it. The segments of a pool, or an allocation in it, show whether it has ours.

Otherwise a capture uses a pool of this package: a new one without a token, else the one that the token was mapped to at its
first use with these options and this device. Only a program that routes to the token itself can detect that. Such a pool
lives as long as a graph captured with it: replays use its memory, and torch does not track which part. A pool holds memory
of one tag and one kind of backup, because graphs of one pool use each other's idle memory.

CUDA may invalidate a capture, for instance because the program waited for the device in it. ``torch.cuda.graph`` then fails
in its exit, before it has restored everything (seen up to 2.14): the capture's stream stays current, the pool stays routed
and is never released, and random numbers fail with "Offset increment outside graph capture". :func:`clean_up` restores the
rest.

The functions about tokens and the clean-up call torch, so they are called with no lock held.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import binary_size
from torch_memory_saver._torch.base import region_settings
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.base.steps import InterruptSafeExitStack, call_each
from torch_memory_saver._torch.binding.captures import CaptureAnnouncement
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda, eager_methods, pool_of
from torch_memory_saver._torch.graphs.kept_objects import BlasWorkspaces
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.frames import FunctionDecorator
from torch_memory_saver._torch.records.pool import Key, Pool
from torch_memory_saver._torch.routing.program_pools import refuse_paused
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import RegionOptions

__all__ = [
    "GraphCapture",
    "GraphPools",
    "bytes_not_managed",
    "check_token",
    "clean_up",
    "managed_default_pool_bytes",
    "names_pool_to_use",
    "replaced_error",
]

logger = logging.getLogger("torch_memory_saver")

#: torch's error if a routing is ended that is not in force.
_NOT_ROUTED = "not currently recording to mempool_id"
_WAYS_OUT = (
    'start the process with the preload library (hook mode "preload"; see configure_subprocess()), or give cuda_graph() the '
    "id of a torch.cuda.MemPool that was made with this package's allocator"
)


class _CapturePool:
    """The pool of a capture: that of its token.

    Attributes:
        epoch: The pause epoch of the tag when the pool's memory was last seen to be resident.
    """

    __slots__ = ("epoch", "id")

    def __init__(self, id: PoolId, epoch: int) -> None:
        self.id = id
        self.epoch = epoch


class _SharedPool(_CapturePool):
    """A pool of this package that captures use, with its users: captures that run, or whose graph lives."""

    __slots__ = ("pool", "token", "users")

    def __init__(self, pool: Pool, token: PoolId | None, epoch: int) -> None:
        super().__init__(pool.id, epoch)
        self.pool = pool
        self.token = token
        self.users: set[object] = set()


class _TokenKey(NamedTuple):
    """The key of a pool that replaces a token's own."""

    token: PoolId
    key: Key


class GraphPools:
    """The pools of captured graphs. The lock is never held across a call of torch, like the store's, and a signal handler
    that raises does not leave it held."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self.warned_of_nccl = False
        #: Whether torch's default pool may hold managed memory.
        self.default_pool_managed = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._by_token: dict[_TokenKey, _SharedPool] = {}
        self._by_id: dict[PoolId, _SharedPool] = {}
        self._streams: dict[int, Any] = {}
        self._warned: set[PoolId] = set()  # tokens of pools with ordinary memory

    after_fork_in_child = _reset

    def acquire(self, torch: TorchCuda, token: PoolId | None, key: Key, capture: _Capture) -> _CapturePool:
        """Return the pool for a capture, which becomes its user. The capture records the pool first.

        Raises:
            InvalidStateError: The token's pool already holds memory that is not managed, or is paused.
        """
        epoch = _core.tag_info(key.options.tag).epoch  # before the token's segments are read
        shared, is_ours = _core.within(self._lock, self._join, token, key, capture)
        if shared is None:
            if token is not None and not is_ours and names_pool_to_use(torch, token, key):
                capture.pool = _CapturePool(token, epoch)
                return capture.pool
            return self._create(torch, token, key, epoch, capture)
        self.check_resident(torch, shared, key.options.tag)
        return shared

    def _join(self, token: PoolId | None, key: Key, capture: _Capture) -> tuple[_SharedPool | None, bool]:
        """Make a capture a user of the pool that there is for its token. Return the pool, or None, and whether the token is
        the id of a pool of this package. The caller holds the lock."""
        shared = self._find(token, key)
        if shared is not None:
            capture.pool = shared
            shared.users.add(capture.user)
        return shared, token in self._by_id

    def check_resident(self, torch: TorchCuda, pool: _CapturePool, tag: str) -> None:
        """Check that no pause since the last check has taken memory of the pool. A capture calls it again once it has been
        announced, because from then on no pause can begin.

        Raises:
            InvalidStateError: The pool's memory may be paused.
        """
        info = _core.tag_info(tag)
        if info.paused and pool.epoch != info.epoch:
            if not isinstance(pool, _SharedPool):
                refuse_paused(torch, pool.id)
            elif len(pool.users) > 1:  # otherwise no graph has been captured into it, and it has no memory yet
                raise InvalidStateError(
                    f"the memory of this graph pool may be paused: resume tag {tag!r} before capturing into it again",
                    operation="cuda_graph",
                    tag=tag,
                )
        pool.epoch = info.epoch

    def _find(self, token: PoolId | None, key: Key) -> _SharedPool | None:
        if token is None:
            return None
        own = self._by_id.get(token)
        if own is not None and own.pool.key == key:
            return own
        return self._by_token.get(_TokenKey(token, key))

    def _create(self, torch: TorchCuda, token: PoolId | None, key: Key, epoch: int, capture: _Capture) -> _SharedPool:
        pool = self._store.idle_pools.make_pool(torch, key)
        made = _SharedPool(pool, token, epoch)
        shared = _core.within(self._lock, self._add, made, capture)
        if shared is not made:
            self._store.idle_pools.retire(torch, pool)
        return shared

    def _add(self, made: _SharedPool, capture: _Capture) -> _SharedPool:
        """Add a new pool, and make a capture its user, unless another thread has added one for the token. Return the pool
        that the capture uses. The caller holds the lock."""
        token, key = made.token, made.pool.key
        other = self._find(token, key)
        shared = made if other is None else other
        capture.pool = shared
        shared.users.add(capture.user)
        if other is None:
            self._by_id[made.id] = made
            if token is not None:
                self._by_token[_TokenKey(token, key)] = made
        return shared

    def capture_stream(self, torch: TorchCuda, device: int) -> Any:
        """Return the stream for captures that name none. torch's own stream is on the device of the process's first capture.
        None: torch's stream fits this device."""
        default = getattr(torch.torch.cuda.graph, "default_capture_stream", None)
        if default is None or default.device_index == device:
            return None
        if device not in self._streams:
            self._streams[device] = torch.torch.cuda.Stream(device)
        return self._streams[device]

    def release(self, shared: _CapturePool, user: object) -> None:
        """Remove a user. Removing the last one retires the pool. Finalizers call this too, so it does not call torch. May be
        repeated."""
        if not isinstance(shared, _SharedPool):
            return
        if _core.within(self._lock, self._remove_user, shared, user):
            self._store.idle_pools.retire_later(shared.pool)

    def _remove_user(self, shared: _SharedPool, user: object) -> bool:
        """Remove a user. The last one takes the pool with it. Return whether it did. The caller holds the lock."""
        shared.users.discard(user)
        if shared.users or self._by_id.pop(shared.pool.id, None) is None:
            return False
        if shared.token is not None:
            self._by_token.pop(_TokenKey(shared.token, shared.pool.key), None)
        return True

    def keep_with(self, graph: Any, shared: _CapturePool, user: object) -> None:
        """Keep the pool for the user until the captured graph ends. May be repeated."""
        if not isinstance(shared, _SharedPool):
            return
        # The finalizer does not run at exit, because the pool's reference is leaked.
        weakref.finalize(graph, self.release, shared, user).atexit = False

    def warn_of_unmanaged(self, torch: TorchCuda, token: PoolId) -> None:
        """Warn of memory that a pause cannot release. To be called in preload mode, after a capture into the pool of a
        program's token."""
        ordinary = 0 if token in self._warned else bytes_not_managed(torch, token)
        if ordinary:
            self._warned.add(token)
            logger.warning(
                "%s of graph pool %s are ordinary memory, which no pause releases. They were allocated by "
                "torch.cuda.graph() before this capture, or by another thread during it",
                binary_size(ordinary),
                token,
            )
        reusable = 0 if self.default_pool_managed else managed_default_pool_bytes(torch)
        if reusable:
            self.default_pool_managed = True
            logger.warning(
                "%s of managed memory were allocated in PyTorch's default pool during a capture, because the program "
                "ended the routing to the graph's pool in the capture. This memory is paused with the tag of the graph "
                "(reusable_bytes of the report)",
                binary_size(reusable),
            )


class _Capture:
    """The record of a capture: everything that was begun for it, so that a signal handler that raises leaves nothing in
    force.

    Attributes:
        device: The device of the capture.
        user: The user of the pool. It outlives this object with the captured graph, to which this object refers.
        pool: The pool; None before it is known.
        outer_stream: The stream that was current before; None before it is known.
        graph_has_begun: True once PyTorch's begin of the capture was called.
        last_resort: The one call that ends a capture that PyTorch's exit has not ended; None before that.
        entered: The context managers that are left at the end of the capture.
        is_over: True once the pool has been kept for the graph, or released.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.user = object()
        self.pool: _CapturePool | None = None
        self.outer_stream: Any = None
        self.graph_has_begun = False
        self.last_resort: Iterator[partial[Any]] | None = None
        self.is_over = False
        self.entered = InterruptSafeExitStack()

    def begin_graph(self, graph: Any) -> None:
        """Enter torch.cuda.graph. If that fails, its exit is not called. Context managers that its entry enters are left
        after its exit."""
        self.graph_has_begun = True
        graph.__enter__()
        self.entered.add(graph)


@eager_methods
class GraphCapture(_core.Scope, FunctionDecorator):
    """The context manager that cuda_graph() returns. ``_core.Scope`` calls its methods."""

    def __init__(
        self,
        store: PoolStore,
        pools: GraphPools,
        workspaces: BlasWorkspaces,
        torch: TorchCuda,
        graph: Any,
        token: PoolId | None,
        stream: Any,
        capture_error_mode: str,
        options: RegionOptions,
    ) -> None:
        self._store = store
        self._pools = pools
        self._workspaces = workspaces
        self._torch = torch
        self._graph = graph
        self._token = token
        self._stream = stream
        self._capture_error_mode = capture_error_mode
        self._options = options
        self._captures: list[_Capture] = []  # captures that have begun and not ended

    def __repr__(self) -> str:
        return f"<cuda_graph(tag={self._options.tag!r}), {'entered' if self._captures else 'not entered'}>"

    def _open(self) -> _Capture:
        return _Capture(self._torch.current_device() if self._stream is None else self._stream.device_index)

    def _choose(self) -> _Capture:
        if not self._captures:
            raise InvalidStateError(
                "cuda_graph() cannot be left, because it is not entered: __exit__ was called twice, or without __enter__. "
                "Use a with statement",
                operation="leave a capture",
            )
        return self._captures[-1]

    def _enter(self, capture: _Capture) -> None:
        torch, device = self._torch, capture.device
        _warn_of_nccl(self._pools)
        self._store.outside_memory.begin_capture(torch)
        # torch empties its cache before a capture, but that has no effect while this thread is in a region.
        self._store.empty_cache(torch)
        key = Key(self._options, device)
        stream = self._pools.capture_stream(torch, device) if self._stream is None else self._stream
        # During the capture this thread routes no other pool: torch first allocates the state of the device's random
        # generator, for all later graphs, which must not be paused with any tag.
        capture.entered.enter(self._store.regions.routing_suspended(torch))
        pool = self._pools.acquire(torch, self._token, key, capture)
        # These settings are unmanaged, so allocations outside the pool are ordinary memory. Allocations of a pool with this
        # package's allocator use these settings in any case.
        capture.entered.enter(region_settings.RegionSettings(self._options.unmanaged()))
        capture.outer_stream = torch.torch.cuda.current_stream()
        graph = torch.torch.cuda.graph(self._graph, pool=pool.id, stream=stream, capture_error_mode=self._capture_error_mode)
        self._store.regions.note_entered(self._options.tag)

        def announce() -> None:
            capture.entered.enter(region_settings.AnnouncedCapture(self._options))
            self._pools.check_resident(torch, pool, self._options.tag)
            self._workspaces.make_again(torch, device)

        def begin() -> None:
            capture.entered.enter(StoppedCollector())
            capture.begin_graph(graph)

        renewed = self._workspaces.renewed(torch, graph.capture_stream)
        _core.within(renewed, _core.within, CaptureAnnouncement(announce), begin)
        if _core.preloaded and not isinstance(pool, _SharedPool):
            # torch calls cudaMalloc for such a pool, which uses the settings of its thread.
            capture.entered.enter(torch.autograd_on_this_thread())
            capture.entered.enter(region_settings.RegionSettings(self._options))
        self._captures.append(capture)

    def _leave(self, capture: _Capture) -> None:
        capture.entered.leave()
        pool = capture.pool
        if pool is not None and not capture.is_over:
            if capture in self._captures and capture.entered.has_succeeded:
                self._pools.keep_with(self._graph, pool, capture.user)
            else:
                self._pools.release(pool, capture.user)
                self._clean_up(capture, pool.id)
            capture.is_over = True
        if capture in self._captures:
            self._captures.remove(capture)

    def _clean_up(self, capture: _Capture, pool: PoolId) -> None:
        """End what PyTorch may have left of a capture that failed to begin or to end."""
        torch = self._torch
        if capture.outer_stream is None:
            return
        if _is_capturing(torch):
            if capture.last_resort is None:
                capture.last_resort = iter([partial(self._graph.capture_end)])
            call_each(capture.last_resort)
        if capture.graph_has_begun:
            clean_up(torch, capture.device, pool, capture.outer_stream)
        else:
            torch.torch.cuda.set_stream(capture.outer_stream)

    def _left(self, capture: _Capture, exception: BaseException | None) -> None:
        assert capture.pool is not None
        if _core.preloaded and not isinstance(capture.pool, _SharedPool):
            self._pools.warn_of_unmanaged(self._torch, capture.pool.id)
        error = replaced_error(exception, self._token, capture.pool.id)
        if error is not None:
            raise error from exception


def _is_capturing(torch: TorchCuda) -> bool:
    """Return whether this thread's current stream is capturing. A lost device captures nothing."""
    try:
        return bool(torch.is_capturing())
    except RuntimeError:
        return False


def _warn_of_nccl(pools: GraphPools) -> None:
    """Warn once if collectives in this graph may keep references to physical memory that a pause releases."""
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


def check_token(token: object) -> PoolId | None:
    """Return torch's token of a pool (a pair of ints), or None."""
    if token is None:
        return None
    if isinstance(token, (tuple, list)) and len(token) == 2 and all(isinstance(part, int) for part in token):
        return (int(token[0]), int(token[1]))
    raise InvalidArgumentError(
        "pool must be a token from torch.cuda.graph_pool_handle() or from a graph's or MemPool's id, or None, "
        f"not {type(token).__name__}: {token!r}"
    )


def names_pool_to_use(torch: TorchCuda, token: PoolId, key: Key) -> bool:
    """Return whether a capture uses the token's own pool. If not, a managed pool replaces it.

    Raises:
        InvalidStateError: The pool holds memory that cannot be managed, or that is paused.
    """
    options = key.options
    found = refuse_paused(torch, token)
    managed = [row for row in found if row is not None]
    if not _core.preloaded:
        if len(managed) < len(found):
            raise InvalidStateError(
                f"graph pool {token} already holds memory that is not managed: give cuda_graph() a token that only "
                f"cuda_graph() has used, or none, or {_WAYS_OUT}",
                operation="cuda_graph",
                tag=options.tag,
            )
        if not found:
            settings = region_settings.RegionSettings(options)
            return _core.within(settings, torch.has_our_allocator, token, key.device)
    return all(row.tag == options.tag and row.backup == options.backup for row in managed)


def bytes_not_managed(torch: TorchCuda, token: PoolId) -> int:
    """Return the bytes of ordinary memory in the token's pool."""
    return sum(int(row["total_size"]) for row in torch.segments(token) if _core.find(row["address"]) is None)


def managed_default_pool_bytes(torch: TorchCuda) -> int:
    """Return the managed bytes of torch's default pool."""
    return sum(
        int(row["total_size"])
        for row in torch.segments()
        if pool_of(row) == DEFAULT_POOL and _core.find(row["address"]) is not None
    )


def replaced_error(exception: BaseException | None, token: PoolId | None, used: PoolId) -> InvalidStateError | None:
    """Return the error for ending the routing to a token whose pool has been replaced, or None."""
    if token in (None, used) or not isinstance(exception, RuntimeError) or _NOT_ROUTED not in str(exception):
        return None
    return InvalidStateError(
        f"the program ended the routing to graph pool {token} inside a capture, but the capture allocates from pool {used} "
        f"instead, because the memory of the former cannot be managed: {_WAYS_OUT}",
        operation="cuda_graph",
    )


def clean_up(torch: TorchCuda, device: int, pool: PoolId, stream: Any) -> None:
    """Restore what a failed ``torch.cuda.graph`` has left. Does nothing if PyTorch has done it.

    Args:
        torch: PyTorch.
        device: The device of the capture.
        pool: The pool of the capture.
        stream: The stream that was current before the capture.
    """
    torch.torch.cuda.set_stream(stream)
    try:
        torch.end_routing(device, pool)
    except RuntimeError as error:
        if _NOT_ROUTED not in str(error):
            raise
        return  # PyTorch has cleaned up
    torch.release_pool(device, pool)
    _end_capture_of_generator(torch.torch, device)


def _end_capture_of_generator(torch: Any, device: int) -> None:
    """End the capture of the device's random generator by another capture: the end of any capture ends it."""
    with torch.cuda.device(device):
        target, graph = torch.empty(1, device="cuda"), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            target.zero_()  # PyTorch warns of graphs without a kernel
            graph.capture_end()
