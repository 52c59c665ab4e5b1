"""Tensors in regions, and what PyTorch and the core say about their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from other_threads import other_thread_inside

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
DEFAULT_POOL = (0, 0)


def empty(size: int, device: int = 0) -> torch.Tensor:
    """Allocate an uninitialised tensor of `size` bytes. PyTorch gives one of 20 MiB or more a segment of its own."""
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def tag_of(tensor: torch.Tensor) -> str | None:
    """Return the tag of the tensor's memory, or None if that is not managed."""
    found = _core.find(tensor.data_ptr())
    return None if found is None else found.tag


def is_active(tensor: torch.Tensor) -> bool:
    found = _core.find(tensor.data_ptr())
    assert found is not None, "not managed"
    return found.state == _core.STATE_ACTIVE


def pool_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the id of the pool that PyTorch has allocated the tensor from."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("PyTorch does not list the tensor")


def resident(tag: str) -> int:
    """Return the managed bytes of the tag that hold device memory."""
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


def addresses(*tags: str) -> list[int]:
    """Return the addresses of the managed allocations of the tags."""
    return sorted(row.address for row in _core.segments() if row.tag in tags)


@contextmanager
def another_thread_inside(tag: str, size: int = 20 * MIB) -> Iterator[list[Any]]:
    """Keep another thread in a region of the tag, and yield a list with the tensor that it has allocated there."""
    tensors: list[Any] = []
    with other_thread_inside(saver.region(tag), first=lambda: tensors.append(empty(size))):
        yield tensors
