"""PyTorch's own counters of device memory, and what of it is physical."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.history import may_have_native_frames
from torch_memory_saver._torch.layer import devices_in_use

__all__ = ["DeviceMemory", "OrdinaryMemory", "device_memory", "ordinary_memory"]

_PAUSED = (_core.STATE_PAUSED, _core.STATE_RESUMING)


@dataclass(frozen=True)
class DeviceMemory:
    """One device, in this process. All in bytes.

    Attributes:
        device: CUDA ordinal.
        allocated: In tensors.
        reserved: In segments.
        peak_allocated: The highest `allocated` since the peaks were last reset.
        peak_reserved: The highest `reserved` since then.
        paused: Of `reserved`: segments without physical memory, because they are paused.
        slack: Of managed allocations that were freed: memory that their runs still hold. Not in `reserved`.
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
        """What PyTorch's segments hold of the device's memory: those without the paused ones."""
        return self.reserved - self.paused

    @property
    def held(self) -> int:
        """What the device lacks because of them: also what freed ones have left."""
        return self.physical + self.slack


def device_memory(torch: Any, devices: Iterable[int]) -> list[DeviceMemory]:
    """The counters of the devices, of which each must be in use.

    Args:
        torch: `TorchCuda` of `_torch/layer.py`.
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
    """What PyTorch has reserved of one device's memory and is not managed.

    Attributes:
        segments: Their number; of expandable ones, each is one. None where only counters were read.
        bytes: Physical, of the segments.
        cached: The part of `bytes` that no tensor uses and no stream may still use.
    """

    segments: int | None = 0
    bytes: int = 0
    cached: int = 0


def ordinary_memory(torch: Any, managed: Collection[int]) -> dict[int, OrdinaryMemory]:
    """By device, of those on which there is any. From PyTorch's counters where its list of segments would have it start a
    process: in preload mode managed memory of other libraries is then taken for PyTorch's.

    Args:
        torch: `TorchCuda` of `_torch/layer.py`.
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
    """By device: bytes of PyTorch's segments that are paused. In preload mode other libraries' memory may be paused as
    well, which PyTorch does not count."""
    rows = [row for row in _core.segments() if row.state in _PAUSED]
    if not rows:
        return {}
    sizes = {segment["address"]: segment["total_size"] for segment in torch.segments()}
    paused: dict[int, int] = {}
    for row in rows:
        paused[row.device] = paused.get(row.device, 0) + sizes.get(row.address, 0)
    return paused
