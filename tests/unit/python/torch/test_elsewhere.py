"""Guards the report of memory that torch takes outside of every region while one is open."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from fake_torch import FakeGraph, FakeSegment, FakeTorch, another_thread_inside
from threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO, logger="torch_memory_saver")

    def messages(words: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if words in record.getMessage()]

    return messages


TAKEN, NOTHING = "no region manages", "managed nothing"


def test_allocations_of_another_thread_are_reported_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    for _ in range(4):
        with saver.region("a"):
            fake_torch.allocate(2 * MIB)
            in_thread(lambda: fake_torch.allocate(6 * MIB))
    (message,) = reports(TAKEN)
    assert message.startswith("while region(tag='a') was open PyTorch took 6 MiB of GPU memory")
    assert "torch_memory_saver.bind_region(function)" in message
    with saver.region("b"):
        in_thread(lambda: fake_torch.allocate(6 * MIB))
    assert len(reports(TAKEN)) == 2


def test_later_regions_of_a_tag_are_looked_at_as_well(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    for _ in range(3):
        with saver.region("a"):
            fake_torch.allocate(2 * MIB)
    for expected in (1, 1):
        with saver.region("a"):  # the fourth, and one that is not looked at
            in_thread(lambda: fake_torch.allocate(6 * MIB))
        assert len(reports(TAKEN)) == expected


def test_managed_memory_is_not_reported(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    with saver.region("a"):
        fake_torch.allocate(20 * MIB)
        with saver.region("b"):
            fake_torch.allocate(20 * MIB)
        with another_thread_inside(saver, fake_torch, "c"):
            pass
        graph = fake_torch.torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph):
            fake_torch.allocate(20 * MIB)
        in_thread(lambda: fake_torch.allocate(2 * MIB))  # too little
        saver.pause("b")
        saver.resume("b")
    assert reports(TAKEN) == []


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
        fake_torch.rows.append(FakeSegment((0, 9), device, _core.allocate(20 * MIB, device), 20 * MIB, 0, True))
        return reserved_bytes(device)

    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        monkeypatch.setattr(fake_torch, "reserved_bytes", look)
    assert looks == [0, 0, 0]
    assert reports(TAKEN) == []


def test_freed_managed_memory_of_others_is_not_reported(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    """Such as a communication library's buffer in preload mode, or memory that PyTorch has freed during a pause."""
    with saver.region("b"):
        address = _core.allocate(20 * MIB, 0)
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        _core.free(address)
    assert reports(TAKEN) == []


def test_disable_is_meant(saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]) -> None:
    with saver.region("a"), saver.disable():
        fake_torch.allocate(20 * MIB)
    assert reports(TAKEN) == []


def test_a_region_that_fails_is_not_looked_at(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    with pytest.raises(ZeroDivisionError), saver.region("a"):
        in_thread(lambda: fake_torch.allocate(20 * MIB))
        raise ZeroDivisionError
    assert reports(TAKEN) == []


def test_a_region_in_which_nothing_is_allocated_is_information(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    with saver.region("a"):
        pass  # The earlier allocation still exists.
    assert reports(NOTHING) == []
    for _ in range(4):
        with saver.region("empty"):
            pass
    (message,) = reports(NOTHING)
    assert "region(tag='empty')" in message
    assert {record.levelno for record in caplog.records if NOTHING in record.getMessage()} == {logging.INFO}


def test_only_so_many_tags_are_counted(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_memory_saver._torch.elsewhere._MOST_TAGS", 1)
    for tag, expected in (("a", 1), ("b", 1)):
        with saver.region(tag):
            in_thread(lambda: fake_torch.allocate(6 * MIB))
        assert len(reports(TAKEN)) == expected


def test_a_torch_that_does_not_cache_is_reported_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, reports: Callable[[str], list[str]]
) -> None:
    fake_torch.caches = False
    for tag in ("a", "b"):
        with saver.region(tag):
            pass
        with saver.cuda_graph(FakeGraph(), tag=tag):
            pass
    (region,) = reports("manages nothing")
    assert "region(tag='a') manages nothing" in region
    assert len(reports("a capture fails as soon as it allocates")) == 1


def test_the_preload_library_manages_what_a_torch_that_does_not_cache_allocates(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    reports: Callable[[str], list[str]],
) -> None:
    monkeypatch.setattr(_core, "preloaded", True)
    fake_torch.caches = False
    with saver.region("a"):
        pass
    assert reports("PyTorch calls cudaMalloc for each allocation") == []
