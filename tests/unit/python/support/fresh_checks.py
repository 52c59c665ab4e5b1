"""Allocations for check_fresh(), pauses and resumes of them, and what a report says of them."""

from __future__ import annotations

from typing import Any

from fake_torch import FakeTorch

from torch_memory_saver.reports import UnwrittenBlock
from torch_memory_saver.saver import TorchMemorySaver

__all__ = ["FREE", "LIVE", "MIB", "PENDING", "cycle", "in_region", "places"]

MIB = 1 << 20
#: States of a block, in PyTorch's words.
LIVE, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"


def in_region(
    saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str = "w", size: int = 2 * MIB, device: int = 0, **settings: Any
) -> int:
    with saver.region(tag, **settings):
        return fake_torch.allocate(size, device)


def cycle(saver: TorchMemorySaver, tags: Any = None, **options: Any) -> None:
    saver.pause(tags)
    saver.resume(tags, **options)


def places(blocks: tuple[UnwrittenBlock, ...]) -> list[tuple[int, int]]:
    return [(block.address, block.bytes) for block in blocks]
