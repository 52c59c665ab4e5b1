"""What a pause does about torch's default pool, if that is managed.

torch hands out free blocks of the pool's segments although they are paused. So other pools take its place during the pause
(substitute_pools.py). What they cannot cover is shown in the report, and logged once. So is memory that was allocated while
expandable segments were on, which bypass cudaMalloc: it is not managed. They may be switched on at run time, after the check
at the first use.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.layer import TorchCuda
from torch_memory_saver._torch.pools import Tags, selects
from torch_memory_saver._torch.substitute_pools import DEFAULT_POOL, SubstitutePools, pool_of
from torch_memory_saver.options import DEFAULT_TAG

__all__ = ["DefaultPool"]

logger = logging.getLogger("torch_memory_saver")


class DefaultPool:
    """The numbers of the default pool, and the warnings logged. Any thread may call."""

    def __init__(self, substitutes: SubstitutePools) -> None:
        self._substitutes = substitutes
        self._warned_reusable = False
        self._warned_unmanaged = False

    def prepare(self, torch: TorchCuda, tags: Tags, manages_everything: bool) -> tuple[int, int]:
        """Prepare a pause of `tags` that is about to begin. Return (paused bytes that torch may hand out nevertheless, bytes
        that are not managed in spite of ``TMS_INIT_ENABLE``)."""
        with collector_stopped():
            segments = torch.segments()
        free = self._free_bytes(segments, tags)
        covered = self._substitutes.begin(torch, free)
        reusable = sum(size for device, size in free.items() if device not in covered)
        unmanaged = _expandable_bytes(segments) if manages_everything and selects(tags, DEFAULT_TAG) else 0
        return reusable, unmanaged

    def _free_bytes(self, segments: list[dict[str, Any]], tags: Tags) -> Counter[int]:
        """Return the bytes of free blocks that the pause takes away from torch, by device. A device where it takes none away
        but segments without a free block has 0: a tensor that is deleted becomes one."""
        managed = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
        free: Counter[int] = Counter()
        for segment in segments:
            if segment["address"] in managed and pool_of(segment) == self._substitutes.target(segment["device"]):
                free[segment["device"]] += _free_blocks(segment)
        return free

    def warn_once(self, reusable: int, unmanaged: int) -> None:
        """Log what :meth:`prepare` has returned, after the pause. Each number is logged once."""
        if reusable and not self._warned_reusable:
            self._warned_reusable = True
            logger.warning(
                "%d bytes of the memory that this pause gives back are free blocks of PyTorch's default pool: a tensor made "
                "in them before the resume would be an illegal access. No other pool can take its place, because another "
                "thread is inside a region, or PyTorch is older than 2.11. Allocate inside disable() while paused. "
                "(Said once; the report's reusable_bytes has the number of each pause.)",
                reusable,
            )
        if unmanaged and not self._warned_unmanaged:
            self._warned_unmanaged = True
            logger.warning(
                "%d bytes stay on the GPU although TMS_INIT_ENABLE=1 is to manage everything: PyTorch allocated them while "
                "its expandable segments were on, which bypass cudaMalloc. Keep expandable_segments off in this process, or "
                "put region() around what is to be paused. (Said once; the report's unmanaged_bytes has the number of each "
                "pause.)",
                unmanaged,
            )


def _free_blocks(segment: dict[str, Any]) -> int:
    return sum(int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive")


def _expandable_bytes(segments: list[dict[str, Any]]) -> int:
    return sum(
        int(segment["total_size"])
        for segment in segments
        if segment.get("is_expandable") and pool_of(segment) == DEFAULT_POOL
    )
