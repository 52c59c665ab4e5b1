"""Guards that no garbage collection begins while a pause reads PyTorch's blocks, of which there may be thousands."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch
from interruptions import every_interruption
from other_threads import in_thread

from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.memory.default_pool import DefaultPool
from torch_memory_saver._torch.memory.live_blocks import live_finder
from torch_memory_saver._torch.memory.pause_preparation import PausePreparation
from torch_memory_saver._torch.memory.store import PoolStore
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
        DefaultPool(PoolStore().substitutes).prepare(many_blocks, None)
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
    with collections() as begun, PausePreparation(store, many_blocks, None):
        pass
    assert read > 0
    assert len(begun) <= 1


def test_the_collector_runs_again_after_the_last_use() -> None:
    before = gc.get_threshold()
    with StoppedCollector():
        with StoppedCollector():
            assert not collects()
        assert not collects()
    assert collects()
    assert gc.get_threshold() == before


def collects() -> bool:
    """Whether new objects start a collection."""
    with collections() as begun:
        assert len([[] for _ in range(BLOCKS)]) == BLOCKS
    return bool(begun)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_program_decides_meanwhile(enabled: bool) -> None:
    """What the program, or another thread of it, does to the collector is not undone."""
    change, undo = (gc.enable, gc.disable) if enabled else (gc.disable, gc.enable)
    undo()
    try:
        with StoppedCollector():
            assert gc.isenabled() != enabled
            in_thread(change)
        assert gc.isenabled() == enabled
        assert collects() == enabled
    finally:
        gc.enable()


def test_the_program_sets_thresholds_meanwhile() -> None:
    before = gc.get_threshold()
    try:
        with StoppedCollector():
            gc.set_threshold(0)
            with StoppedCollector():
                assert not collects()
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_child_that_is_forked_meanwhile_by_another_thread() -> None:
    statuses: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() and collects() else 1)
        statuses.append(os.waitpid(child, 0)[1])

    with StoppedCollector():
        in_thread(fork)
    assert statuses == [0]


def test_a_child_that_is_forked_inside() -> None:
    with StoppedCollector():
        child = os.fork()
        if child == 0:
            inside = collects()
    if child == 0:
        os._exit(0 if not inside and collects() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_signal_at_any_place() -> None:
    before = gc.get_threshold()

    def use() -> None:
        with StoppedCollector():
            pass

    for place in every_interruption(use):
        assert gc.get_threshold() == before, place
        assert in_thread(use) is None, place
