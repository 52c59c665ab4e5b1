"""A stand-in for layer.TorchCuda, for tests that inject errors of PyTorch, note its calls or interrupt at any bytecode.

It has PyTorch's pools with their recorded behaviour, over managed memory of the simulated GPU. A test whose result depends
on that behaviour belongs to tests/torch. Each segment holds one tensor. A call that would end a process with PyTorch is
recorded in `crashes` instead.

Any thread, as with PyTorch, and without a lock, which an interrupted test could keep: `rows` and `routings` only change by
single calls of a list, and who goes through them goes through a copy. Two threads may take one idle segment of a pool that
they share, so tests let them share none.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.captures import announce_capture
from torch_memory_saver._torch.binding.layer import leak_reference

PoolId = tuple[int, int]
DEFAULT: PoolId = (0, 0)
#: By how many bytes the peaks that it reports are above what is in use.
PEAK_ABOVE = 1 << 20


#: Size and state of a block, and what else torch says of it.
Block = tuple[int, str] | tuple[int, str, dict[str, Any]]


class FakeSegment:
    def __init__(self, pool: PoolId, device: int, address: int, size: int, managed: bool) -> None:
        self.pool = pool
        self.managed = managed
        self.device = device
        self.address = address
        self.size = size
        self.in_use = True
        self.blocks: list[Block] | None = None  # as the test sets it; None: one, of the one tensor


class FakeMemPool:
    def __init__(self, torch: FakeTorch, device: int, managed: bool) -> None:
        self.torch = torch
        self.id = torch.new_id()
        self.device = device
        torch.uses[self.id] = 1
        torch.managed[self.id] = managed

    def __del__(self) -> None:
        if not hasattr(self, "device"):
            return  # not initialised
        blocking = self.torch.routings if self.torch.routing_spares_cache else self.torch.capturing
        if self.torch.uses[self.id] == 1 and blocking:
            self.torch.crashes.append(f"{self.id} was dropped during {blocking}")
        if self.torch.uses[self.id] != 1 and not self.torch.pool_objects_end_quietly:
            self.torch.crashes.append(f"{self.id} was dropped with {self.torch.uses[self.id]} uses")
        self.torch.uses[self.id] -= 1
        if self.torch.uses[self.id] == 0:
            self.torch.release_idle(lambda row: row.pool == self.id)


class FakeGraph:
    def __init__(self) -> None:
        self.pool_id: PoolId | None = None
        self.torch: FakeTorch | None = None

    def __del__(self) -> None:
        if self.torch is not None and self.pool_id is not None:
            self.torch.release_pool(0, self.pool_id)


class FakeTorch:
    """Args:
    release: The release of PyTorch whose behaviour it has.
    """

    def __init__(self, release: tuple[int, int] = (2, 11)) -> None:
        self.last_routed_wins = release >= (2, 10)
        self.captures_join_regions = release < (2, 11)
        self.pool_objects_end_quietly = release >= (2, 10)
        self.routing_spares_cache = release < (2, 13)
        self.uses: dict[PoolId, int] = {}
        self.managed: dict[PoolId, bool] = {}
        self.begun: set[PoolId] = set()
        self.ordinary_pools: set[PoolId] = set()
        self.routings: list[tuple[int, PoolId, int | None]] = []  # None: of every thread
        self.caching = self.caches = True
        self.rows: list[FakeSegment] = []
        self.crashes: list[str] = []
        self.capturing: list[tuple[FakeGraph, PoolId]] = []
        self.fail_begin_of_new_pools_on = -1  # a device
        self.threads_without_autograds: set[int] = set()
        self.devices = 1  # that are visible
        self.device = 0
        self.active_devices = 1 << 0
        self.emptied = 0
        self.freed = 0  # blocks
        self.calls: list[str] = []  # of functions that only matter by their order
        self.ids = itertools.count(1)
        self.unmanaged_addresses = itertools.count(1 << 60, 1 << 40)
        self.stream: object = "main stream"
        self.torch = SimpleNamespace(
            cuda=SimpleNamespace(
                CUDAGraph=FakeGraph,
                MemPool=type("MemPool", (FakeMemPool,), {}),
                graph=self.graph,
                current_stream=lambda: self.stream,
                set_stream=lambda stream: setattr(self, "stream", stream),
                stream=lambda stream: contextlib.nullcontext(),
                current_blas_handle=self.current_blas_handle,
            ),
            _C=SimpleNamespace(),
            is_grad_enabled=lambda: False,
        )
        self.workspaces: list[tuple[list[tuple[int, PoolId, int | None]], int]] = []  # routings and captures at each

    @property
    def alive(self) -> set[PoolId]:
        """The pools in use."""
        return {pool for pool, uses in self.uses.items() if uses}

    def new_id(self) -> PoolId:
        return (0, next(self.ids))

    # The interface of TorchCuda.

    def make_pool(self, device: int, managed: bool) -> FakeMemPool:
        memory_pool = FakeMemPool.__new__(FakeMemPool)
        leak_reference(memory_pool)
        memory_pool.__init__(self, device, managed)  # type: ignore[misc]
        return memory_pool

    def begin_routing(self, device: int, pool: PoolId) -> None:
        self._begin_routing(device, pool, threading.get_ident())

    def begin_routing_of_all_threads(self, device: int, pool: PoolId) -> None:
        self._begin_routing(device, pool, None)

    def _begin_routing(self, device: int, pool: PoolId, thread: int | None) -> None:
        if device == self.fail_begin_of_new_pools_on and pool not in self.begun:
            raise RuntimeError("begin: injected failure")
        if any((device, pool) == routing[:2] for routing in list(self.routings)):
            raise RuntimeError("already recording to mempool_id")
        self.begun.add(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1  # a token's pool is made at its first use
        self.routings.append((device, pool, thread))

    def end_routing(self, device: int, pool: PoolId) -> None:
        for routing in list(self.routings):
            if routing[:2] == (device, pool):
                self.routings.remove(routing)
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release_pool(self, device: int, pool: PoolId) -> None:
        assert self.uses[pool] > 0
        self.uses[pool] -= 1

    def ipc_collect(self) -> None:
        self.calls.append("ipc_collect")

    def synchronize(self, device: int) -> None:
        self.calls.append(f"synchronize {device}")

    def empty_host_cache(self) -> None:
        self.calls.append("empty_host_cache")

    def empty_cache(self) -> None:
        self.emptied += 1
        self.calls.append("empty_cache")

        def is_released(row: FakeSegment) -> bool:
            if row.pool != DEFAULT:
                return self.uses[row.pool] == 0
            if self.routing_spares_cache:
                return not any(row.device == device for device, *_ in list(self.routings))
            return not self.capturing

        self.release_idle(is_released)

    def release_idle(self, is_released: Callable[[FakeSegment], bool]) -> None:
        for row in list(self.rows):
            if not row.in_use and is_released(row):
                try:
                    self.rows.remove(row)
                except ValueError:
                    continue  # another thread has removed it
                if row.managed:
                    assert _core.free(row.address)

    def set_caching(self, on: bool) -> None:
        self.caching = on
        self.calls.append(f"caching {'on' if on else 'off'}")

    def autograd_threads(self) -> bool:
        return threading.get_ident() not in self.threads_without_autograds

    def set_autograd_threads(self, enabled: bool) -> None:
        thread = threading.get_ident()
        (self.threads_without_autograds.discard if enabled else self.threads_without_autograds.add)(thread)

    def current_device(self) -> int:
        return self.device

    def current_stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return bool(self.capturing)

    def settings(self) -> dict[str, Any]:
        return {}

    def autograd_on_this_thread(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def uses_of(self, memory_pool: FakeMemPool | None) -> int:
        return 0 if memory_pool is None else self.uses[memory_pool.id]

    def releasable_bytes(self, device: int) -> int:
        return sum(row.size for row in list(self.rows) if row.device == device and not row.in_use)

    def count_frees(self, device: int) -> int:
        return self.freed

    def reserved_bytes(self, device: int) -> int:
        return sum(row.size for row in list(self.rows) if row.device == device)

    def uuid(self, device: int) -> str:
        return f"GPU-{device}"

    def summary(self, device: int) -> str:
        return f"a table,\nof device {device}"

    def memory_stats(self, device: int) -> dict[str, Any]:
        used = sum(row.size for row in list(self.rows) if row.device == device and row.in_use)
        reserved = self.reserved_bytes(device)
        return {
            "allocated_bytes": {"all": {"current": used, "peak": used + PEAK_ABOVE}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved + PEAK_ABOVE}},
            "active_bytes": {"all": {"current": used, "peak": used + PEAK_ABOVE}},
            "inactive_split_bytes": {"all": {"current": 0, "peak": 0}},
        }

    def segments(self, pool: PoolId = DEFAULT) -> list[dict[str, Any]]:
        return [
            {
                "address": row.address,
                "device": row.device,
                "total_size": row.size,
                "segment_pool_id": row.pool,
                "stream": 0,
                "allocated_size": row.size if row.in_use else 0,
                "active_size": row.size if row.in_use else 0,
                "blocks": [
                    {"size": size, "state": state, **(others[0] if others else {})}
                    for size, state, *others in row.blocks or [(row.size, "active_allocated" if row.in_use else "inactive")]
                ],
            }
            for row in list(self.rows)
            if pool in (DEFAULT, row.pool)
        ]

    # The actions of a program.

    def pool_of_thread(self, device: int) -> PoolId:
        threads = (threading.get_ident(), None)
        mine = [pool for routed, pool, thread in list(self.routings) if routed == device and thread in threads]
        if not mine:
            return DEFAULT
        return mine[-1] if self.last_routed_wins else mine[0]

    def allocate(self, size: int, device: int = 0) -> int:
        """A tensor: an idle segment of its pool, or a new one. The address."""
        pool = self.pool_of_thread(device)
        for row in list(self.rows):
            if (row.pool, row.device, row.in_use) == (pool, device, False) and row.size >= size:
                row.in_use = True
                return row.address
        managed = self.managed.get(pool, False) or (_core.preloaded and _core.region_current().managed)
        address = _core.allocate(size, device) if managed else next(self.unmanaged_addresses)
        self.rows.append(FakeSegment(pool, device, address, size, managed))
        return address

    def free(self, address: int) -> None:
        """Frees the tensor; its segment stays with torch."""
        (row,) = (row for row in list(self.rows) if row.address == address)
        row.in_use = False
        self.freed += 1

    def split(self, address: int, *blocks: Block) -> None:
        """The segment's blocks, in order."""
        (row,) = (row for row in list(self.rows) if row.address == address)
        row.blocks = list(blocks)

    def pool_of(self, address: int) -> PoolId:
        (row,) = (row for row in list(self.rows) if row.address == address)
        return row.pool

    def current_blas_handle(self) -> int:
        """torch.cuda.current_blas_handle, which makes a workspace."""
        self.workspaces.append((list(self.routings), len(self.capturing)))
        return 0

    def graph(self, graph: FakeGraph, pool: PoolId, stream: object, capture_error_mode: str) -> Any:
        """torch.cuda.graph."""
        context: Any = self.capture(graph, pool, stream, capture_error_mode)
        context.capture_stream = SimpleNamespace(device_index=self.device)
        return context

    @contextlib.contextmanager
    def capture(self, graph: FakeGraph, pool: PoolId, stream: object, capture_error_mode: str) -> Iterator[None]:
        """What it is. Ending it after an exception fails, as it does in torch when the capture was invalidated."""
        before = self.stream
        self.stream = "capture stream"
        announce_capture()  # by capture_begin, which the package has wrapped
        self.begin_routing(self.device, pool)
        self.capturing.append((graph, pool))
        graph.pool_id, graph.torch = pool, self
        try:
            yield
        finally:
            self.capturing.pop()
            self.end_routing(self.device, pool)
            self.stream = before
