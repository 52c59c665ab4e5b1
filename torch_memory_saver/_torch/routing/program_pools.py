"""Pools that the program itself uses: its MemPools, and the pools of graphs that it captures without cuda_graph().

A region owns the pools that the package makes for it. A MemPool that the program routes with ``use_mem_pool()`` inside a
region stays ordinary memory in both hook modes, because the program goes on allocating from it while the tag is paused. In
preload mode the pool's allocator calls ``cudaMalloc``, for which the settings of the thread count. So that thread has
unmanaged settings until the routing ends. A region that begins before that has its own settings. The settings stay in a
capture, whose memory belongs to the graph, and with ``TMS_INIT_ENABLE``, which manages everything.

Managed memory reaches such pools in other ways: by a capture in a preloaded region, with ``TMS_INIT_ENABLE``, or by this
package's allocator. PyTorch hands out their free blocks although these are paused. So a capture into a pool that has paused
memory is refused, and so is a routing to a pool that has free blocks there.

The functions of PyTorch that begin and end a routing are wrapped once, at the first use of the package. ``use_mem_pool``
calls those of ``torch.cuda.memory``; ``torch.compile`` calls that of ``torch._C`` for pools of graphs, whose memory a
preloaded region manages. Any thread may call. There is no lock.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._torch.base.region_settings import enter_region, leave_region
from torch_memory_saver._torch.binding.captures import pool_checks
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda
from torch_memory_saver._torch.routing.regions import Regions
from torch_memory_saver.errors import InvalidStateError

__all__ = ["install", "refuse_paused"]

_BEGIN, _END = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The core's ids of the settings of each routing of this thread, by the arguments of PyTorch's functions.
        self.settings: dict[tuple[int, PoolId], list[int]] = {}


_thread = _Thread()


def install(torch: TorchCuda, regions: Regions, manages_everything: bool) -> None:
    """Wrap PyTorch's functions that route a thread to a pool, and check the pools of captures. Does nothing when called
    again.

    Args:
        torch: PyTorch, which has looked up the functions for its own routings before.
        regions: The frames of this process's threads.
        manages_everything: Whether ``TMS_INIT_ENABLE`` is in force.
    """
    extension, memory = torch.torch._C, torch.torch.cuda.memory
    if is_replaced(memory, _BEGIN) or not hasattr(memory, _BEGIN):
        return
    pool_checks.append(functools.partial(refuse_paused, torch, operation="capture"))
    begin = _refusing(torch, getattr(memory, _BEGIN))
    replace(f"torch._C.{_BEGIN}", extension, _BEGIN, begin)
    if _core.preloaded and torch.last_routed_wins:
        replace(f"torch.cuda.memory.{_END}", memory, _END, _leaving_settings(getattr(memory, _END)))
        begin = _entering_settings(torch, begin, regions, manages_everything)
    replace(f"torch.cuda.memory.{_BEGIN}", memory, _BEGIN, begin)


def _refusing(torch: TorchCuda, begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_routing(device: int, pool: PoolId) -> None:
        if any(row.paused_bytes for row in _core.usage(None)):
            refuse_paused(torch, pool, "use_mem_pool", only_free=True)
        begin(device, pool)

    return begin_routing


def _entering_settings(
    torch: TorchCuda, begin: Callable[..., None], regions: Regions, manages_everything: bool
) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_routing(device: int, pool: PoolId) -> None:
        frames = [frame for frame in regions.stack() if frame.managed]
        if manages_everything or not frames or not _core.region_current().managed or torch.is_capturing():
            begin(device, pool)
            return
        ids: list[int] = []
        try:
            # The region's own pools, which serve the other devices, use these settings but for `managed`.
            enter_region(ids, frames[-1].options.unmanaged())
            begin(device, pool)
            _thread.settings[device, pool] = ids
        except BaseException:
            leave_region(ids)
            raise

    return begin_routing


def _leaving_settings(end: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(end)
    def end_routing(device: int, pool: PoolId) -> None:
        try:
            end(device, pool)
        finally:
            leave_region(_thread.settings.pop((device, pool), []))

    return end_routing


def refuse_paused(
    torch: TorchCuda, pool: PoolId, operation: str = "cuda_graph", only_free: bool = False
) -> list[_core.Segment | None]:
    """Return the managed allocation of each segment of a pool; None for ordinary memory.

    Args:
        torch: PyTorch.
        pool: The pool's id.
        operation: What is refused, for the error.
        only_free: Whether to accept paused segments without a free block.

    Raises:
        InvalidStateError: One of the segments is paused.
    """
    found: list[_core.Segment | None] = []
    for segment in torch.segments(pool):
        row = _core.find(segment["address"])
        found.append(row)
        if row is None or row.state == _core.STATE_ACTIVE or (only_free and not _has_free_block(segment)):
            continue
        raise InvalidStateError(
            f"the memory of pool {pool} is paused, and PyTorch would hand it out: resume tag {row.tag!r} before "
            + ("allocating from the pool" if only_free else "capturing into it again"),
            operation=operation,
            tag=row.tag,
        )
    return found


def _has_free_block(segment: dict[str, Any]) -> bool:
    return any(block["state"] == "inactive" for block in segment["blocks"])
