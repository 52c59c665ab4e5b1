"""The findings of a comparison as plain values, for JSON. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .fragmentation import DeviceUsage, Fragmentation
from .growth import StackGrowth

if TYPE_CHECKING:
    from .comparison import Comparison

__all__ = ["as_dict"]


def as_dict(comparison: Comparison, top: int | None = None) -> dict[str, Any]:
    """The findings. `top`: entries of each list; None for all."""
    return {
        "moments": list(comparison.moments),
        "notes": list(comparison.notes),
        "processes": [_usage(usage) for usage in comparison.processes],
        "leaks": _growths(comparison.leaks[:top]),
        "warm_ups": _growths(comparison.warm_ups[:top]),
        "grown": _growths(comparison.grown[:top]),
        "varying": _growths(comparison.varying[:top]),
        "drifts": [
            {
                "process": asdict(drift.process),
                "device": drift.device,
                "stack": drift.stack.as_dict(),
                "bytes": drift.bytes,
                "blocks": drift.blocks,
                "positions": list(drift.positions),
                "below": [{"stack": stack.as_dict(), "growth": size} for stack, size in drift.below],
            }
            for drift in comparison.drifts[:top]
        ],
        "fragmentation": [_fragmentation(found) for found in comparison.fragmentation],
    }


def _growths(growths: Sequence[StackGrowth]) -> list[dict[str, Any]]:
    return [
        {
            "process": asdict(growth.process),
            "device": growth.device,
            "stack": growth.stack.as_dict(),
            "bytes": list(growth.bytes),
            "blocks": list(growth.blocks),
            "requested_bytes": list(growth.requested_bytes),
            "growth": growth.growth,
        }
        for growth in growths
    ]


def _usage(usage: DeviceUsage) -> dict[str, Any]:
    return asdict(usage)


def _fragmentation(found: Fragmentation) -> dict[str, Any]:
    return {
        "usage": _usage(found.usage),
        "is_held": found.usage.is_held,
        "unused_grows": found.usage.unused_grows,
        "holders": [
            {
                "stack": holder.stack.as_dict(),
                "bytes": holder.bytes,
                "blocks": holder.blocks,
                "segments": holder.segments,
                "held": holder.held,
            }
            for holder in found.holders
        ],
    }
