"""Empty pools to which this thread's allocations are routed while PyTorch's cache is emptied. Before PyTorch 2.13 such an
emptying spares PyTorch's own cache, and releases the memory of retired pools."""

from __future__ import annotations

from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.pools.idle import IdlePools
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver._torch.records.pool import Key, Pool
from torch_memory_saver._torch.routing.regions import Regions
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions

__all__ = ["SpareRouting"]


class SpareRouting(SingleUseScope):
    """A context manager that routes this thread's allocations to pools without memory, on every device. `spare` contains the
    pools that no thread uses, as lists of one pool for each device."""

    def __init__(self, idle_pools: IdlePools, regions: Regions, spare: list[list[Pool]], torch: TorchCuda) -> None:
        self._idle_pools = idle_pools
        self._regions = regions
        self._spare = spare
        self._torch = torch
        self._frame = Frame(torch, RegionOptions.disabled(DEFAULT_TAG), regions.stack())

    def _begin(self) -> None:
        torch, frame = self._torch, self._frame
        try:
            frame.pools = self._spare.pop()
        except IndexError:
            devices = self._regions.devices()
            frame.pools = [self._idle_pools.make_pool(torch, Key(frame.options, device)) for device in devices]
        self._regions.route_only(torch, frame)

    def _end(self) -> None:
        self._regions.end_route(self._frame)
        pools, self._frame.pools = self._frame.pools, []
        if pools:  # lost if a signal handler raises here, and empty
            self._spare.append(pools)
