"""Guards that no garbage collection begins while a pause reads PyTorch's blocks, of which there may be thousands."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.default_pool import DefaultPool
from torch_memory_saver._torch.live import live_finder
from torch_memory_saver._torch.pausing import pausing
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
#: Many times the number of new objects after which Python begins a collection.
BLOCKS = 50_000


@pytest.fixture
def many_blocks(fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """PyTorch, which describes a large segment beside those that it really has."""
    real = fake_torch.segments

    def segments(*arguments: Any) -> list[dict[str, Any]]:
        blocks = [{"size": 512, "state": "active_allocated"} for _ in range(BLOCKS)]
        return [
            *real(*arguments),
            {"address": 1, "total_size": 512 * BLOCKS, "active_size": 512 * BLOCKS, "stream": 0, "blocks": blocks},
        ]

    monkeypatch.setattr(fake_torch, "segments", segments)
    return fake_torch


@contextlib.contextmanager
def collections() -> Iterator[list[int]]:
    """The generations of the collections that begin inside."""
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield begun
    finally:
        gc.callbacks.remove(note)


def test_reading_blocks_would_begin_collections(many_blocks: FakeTorch) -> None:
    with collections() as begun:
        many_blocks.segments()
    assert len(begun) > 10


def test_what_is_read_about_the_default_pool(many_blocks: FakeTorch) -> None:
    with collections() as begun:
        DefaultPool(PoolStore().substitutes).prepare(many_blocks, None, True)
    assert len(begun) <= 1


def test_what_is_read_about_live_bytes(saver: TorchMemorySaver, many_blocks: FakeTorch, store: PoolStore) -> None:
    with saver.region("a", enable_cpu_backup=True):
        many_blocks.allocate(2 * MIB)
    find = live_finder(many_blocks, store, None, True)
    assert find is not None
    with collections() as begun:
        assert find() is not None
    assert len(begun) <= 1


def test_what_is_read_about_idle_segments(saver: TorchMemorySaver, many_blocks: FakeTorch, store: PoolStore) -> None:
    with saver.region("a"):
        many_blocks.allocate(2 * MIB)
        idle = many_blocks.allocate(4 * MIB)
    many_blocks.free(idle)
    read = 0
    real = many_blocks.segments

    def counted(*arguments: Any) -> list[dict[str, Any]]:
        nonlocal read
        read += 1
        return real(*arguments)

    many_blocks.segments = counted  # type: ignore[method-assign]
    with collections() as begun, pausing(store, many_blocks, None):
        pass
    assert read > 0
    assert len(begun) <= 1


def test_the_collector_runs_again_after_the_last_use() -> None:
    with collector_stopped:
        with collector_stopped:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
