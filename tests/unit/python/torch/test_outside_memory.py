"""Guards the report of memory that PyTorch takes outside of regions while other threads allocate, and of many tags. What is
reported of PyTorch's memory is in tests/torch/test_outside_memory.py."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from fake_torch import FakeSegment, FakeTorch
from other_threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO, logger="torch_memory_saver")

    def messages(words: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if words in record.getMessage()]

    return messages


TAKEN = "no region manages"


@pytest.mark.parametrize("at_entry", [True, False])
def test_allocations_of_other_regions_during_a_look_are_not_reported(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    reports: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    at_entry: bool,
) -> None:
    """Here another thread allocates after the managed memory was read, and before PyTorch reports its own."""
    reserved_bytes = fake_torch.reserved_bytes
    looks: list[int] = []

    def allocate() -> None:
        with saver.region("b"):
            fake_torch.allocate(20 * MIB)

    def look(device: int) -> int:
        looks.append(device)
        if len(looks) == 1:
            in_thread(allocate)
        return reserved_bytes(device)

    for _ in range(2):  # The next region of the tag, its third, is not looked at.
        with saver.region("b"):
            fake_torch.allocate(2 * MIB)
    if at_entry:
        monkeypatch.setattr(fake_torch, "reserved_bytes", look)
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        monkeypatch.setattr(fake_torch, "reserved_bytes", look)
    assert len(looks) == 2 + at_entry  # the disturbed look, again, and after an entry's look that of the exit
    assert reports(TAKEN) == []


def test_a_look_that_is_always_disturbed_reports_nothing(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved_bytes = fake_torch.reserved_bytes
    looks: list[int] = []

    def look(device: int) -> int:
        looks.append(device)
        fake_torch.rows.append(FakeSegment((0, 9), device, _core.allocate(20 * MIB, device), 20 * MIB, True))
        return reserved_bytes(device)

    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        monkeypatch.setattr(fake_torch, "reserved_bytes", look)
    assert looks == [0, 0, 0]
    assert reports(TAKEN) == []


def test_only_so_many_tags_are_counted(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_memory_saver._torch.routing.outside_memory._MAX_TAGS", 1)
    for tag, expected in (("a", 1), ("b", 1)):
        with saver.region(tag):
            in_thread(lambda: fake_torch.allocate(6 * MIB))
        assert len(reports(TAKEN)) == expected
