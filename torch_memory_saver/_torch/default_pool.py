"""The limits of a pause for torch's default pool, if that is managed: shown in the report, and logged once.

torch assigns free blocks of the pool's segments to new tensors although they are paused. Memory allocated while expandable
segments are on bypasses cudaMalloc and is not managed; they may be switched on at run time, after the check at the first
use.
"""

from __future__ import annotations

import logging
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.arguments import DEFAULT_TAG
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools import Tags, selects

__all__ = ["DefaultPool"]

logger = logging.getLogger("torch_memory_saver")

_DEFAULT_POOL: PoolId = (0, 0)


class DefaultPool:
    """The numbers of the default pool, and the warnings logged. Any thread may call."""

    def __init__(self) -> None:
        self._warned_reusable = False
        self._warned_unmanaged = False

    def look(self, torch: TorchCuda, tags: Tags, manages_everything: bool) -> tuple[int, int]:
        """For a pause of `tags` that is about to begin: (paused bytes that torch could assign to new tensors, bytes that are
        not managed in spite of ``TMS_INIT_ENABLE``)."""
        with collector_stopped:
            reusable, unmanaged = _count(torch, tags, manages_everything)
        self._warn_once(reusable, unmanaged)
        return reusable, unmanaged

    def _warn_once(self, reusable: int, unmanaged: int) -> None:
        if reusable and not self._warned_reusable:
            self._warned_reusable = True
            logger.warning(
                "%d bytes of the memory that this pause gives back are free blocks of PyTorch's default pool: a tensor made "
                "in them before the resume would be an illegal access. Allocate inside disable() while paused. "
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


def _count(torch: TorchCuda, tags: Tags, manages_everything: bool) -> tuple[int, int]:
    managed = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
    segments = [row for row in torch.segments() if tuple(row.get("segment_pool_id", _DEFAULT_POOL)) == _DEFAULT_POOL]
    reusable = sum(_free_bytes(segment) for segment in segments if segment["address"] in managed)
    unmanaged = 0
    if manages_everything and selects(tags, DEFAULT_TAG):
        unmanaged = sum(int(segment["total_size"]) for segment in segments if segment.get("is_expandable"))
    return reusable, unmanaged


def _free_bytes(segment: dict[str, Any]) -> int:
    return sum(int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive")
