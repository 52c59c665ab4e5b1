"""Slack: physical memory of freed allocations that their runs still hold, by tag and device.

Reads counters of the native core under a short lock; makes no driver call. Any thread.
"""

from __future__ import annotations

from torch_memory_saver import _core
from torch_memory_saver._torch.pools import Tags, selects

__all__ = ["slack_by_place"]


def slack_by_place(tags: Tags = None, device: int | None = None) -> dict[tuple[str, int], int]:
    """Bytes of slack by tag and device, of the tags (None: all) on one device (None: on each). Without those that have none.
    The keys are in the order of devices."""
    devices = [row.device for row in _core.usage(None) if row.tag is None] if device is None else [device]
    return {
        (row.tag, number): row.slack_bytes
        for number in sorted(devices)
        for row in _core.usage(None, number)
        if row.tag is not None and row.slack_bytes and selects(tags, row.tag)
    }
