"""PyTorch's own counters of device memory, and the part of that memory that is physical."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.history import may_have_native_frames
from torch_memory_saver._torch.binding.layer import devices_in_use

__all__ = ["DeviceMemory", "OrdinaryMemory", "device_memory", "ordinary_memory"]

_PAUSED = (_core.STATE_PAUSED, _core.STATE_RESUMING)


@dataclass(frozen=True)
class DeviceMemory:
    """PyTorch's memory of one device in this process. All values are in bytes.

    Attributes:
        device: CUDA ordinal.
        allocated: Memory in tensors.
        reserved: Memory in segments, including paused segments.
        peak_allocated: The highest `allocated` since the peaks were last reset.
        peak_reserved: The highest `reserved` since then.
        paused: The part of `reserved` that is in paused segments, which have no physical memory.
        slack: Memory of freed managed allocations that their runs still hold. It is not part of `reserved`.
    """

    device: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    paused: int
    slack: int = 0

    @property
    def physical(self) -> int:
        """Device memory that PyTorch's segments hold: `reserved` without the paused segments."""
        return self.reserved - self.paused

    @property
    def held(self) -> int:
        """Device memory that PyTorch's segments hold, and the slack that freed allocations have left."""
        return self.physical + self.slack


def device_memory(torch: Any, devices: Iterable[int]) -> list[DeviceMemory]:
    """Return the counters of the devices, each of which must be in use.

    Args:
        torch: `TorchCuda` of `_torch/binding/layer.py`.
    """
    listed = list(devices)
    paused = _paused_bytes(torch)
    slack = {row.device: row.slack_bytes for row in _core.usage(None) if row.tag is None}
    rows = []
    for device in listed:
        stats = torch.memory_stats(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        rows.append(
            DeviceMemory(
                device=device,
                allocated=int(allocated["current"]),
                reserved=int(reserved["current"]),
                peak_allocated=int(allocated["peak"]),
                peak_reserved=int(reserved["peak"]),
                paused=paused.get(device, 0),
                slack=slack.get(device, 0),
            )
        )
    return rows


@dataclass(frozen=True)
class OrdinaryMemory:
    """Memory of one device that PyTorch has reserved and that is not managed.

    Attributes:
        segments: Number of segments; an expandable segment counts as one. None where only counters were read.
        bytes: Physical bytes of the segments.
        cached: The part of `bytes` that no tensor uses and no stream may still use.
    """

    segments: int | None = 0
    bytes: int = 0
    cached: int = 0


def ordinary_memory(torch: Any, managed: Collection[int]) -> dict[int, OrdinaryMemory]:
    """Return the ordinary memory of each device that has any. PyTorch's counters are read where its list of segments would
    make PyTorch start a process. In preload mode, managed memory of other libraries is then taken for PyTorch's.

    Args:
        torch: `TorchCuda` of `_torch/binding/layer.py`.
        managed: The addresses of all managed allocations.
    """
    if may_have_native_frames(torch.torch):
        return _by_counters(torch, managed)
    memory: dict[int, OrdinaryMemory] = {}
    for segment in torch.segments():
        if segment["address"] in managed:
            continue
        device, size = segment["device"], segment["total_size"]
        before = memory.get(device, OrdinaryMemory())
        memory[device] = OrdinaryMemory(
            (before.segments or 0) + 1, before.bytes + size, before.cached + size - segment["active_size"]
        )
    return memory


def _by_counters(torch: Any, managed: Collection[int]) -> dict[int, OrdinaryMemory]:
    rows = [row for row in _core.segments() if row.address in managed]
    memory: dict[int, OrdinaryMemory] = {}
    for device in devices_in_use():
        stats = torch.memory_stats(device)
        reserved, active = (int(stats[name]["all"]["current"]) for name in ("reserved_bytes", "active_bytes"))
        ordinary = max(0, reserved - sum(row.bytes for row in rows if row.device == device))
        if ordinary:
            memory[device] = OrdinaryMemory(None, ordinary, min(ordinary, reserved - active))
    return memory


def _paused_bytes(torch: Any) -> dict[int, int]:
    """Return the bytes of PyTorch's paused segments, by device. In preload mode memory of other libraries may be paused as
    well, which PyTorch does not count."""
    rows = [row for row in _core.segments() if row.state in _PAUSED]
    if not rows:
        return {}
    sizes = {segment["address"]: segment["total_size"] for segment in torch.segments()}
    paused: dict[int, int] = {}
    for row in rows:
        paused[row.device] = paused.get(row.device, 0) + sizes.get(row.address, 0)
    return paused
