"""Guards release_cached with PyTorch's own allocator: bytes that go back to the driver, captures that stay valid, and
TMS_RELEASE_CACHED in a program that does not know of it."""

from __future__ import annotations

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, assert_close_to, empty, free_bytes, saver, torch

from torch_memory_saver.observe.memory import release_cached, releasing_cached

SIZE = 64 * MIB


def test_both_kinds_of_memory_go_back_to_the_driver() -> None:
    before = free_bytes()
    with saver.region("a"):
        managed, kept = empty(SIZE), empty(2 * SIZE)
    ordinary = empty(SIZE)
    kept.fill_(7)
    del managed, ordinary
    assert_close_to(before - free_bytes(), 4 * SIZE, "held")
    report = release_cached()
    assert_close_to(before - free_bytes(), 2 * SIZE, "held after the release")
    device = report.devices[0]
    assert (device.reserved_before - device.reserved_after, device.freed_bytes) == (2 * SIZE, 2 * SIZE)
    assert device.allocated_before == device.allocated_after == torch.cuda.memory_allocated()
    assert device.reserved_after == torch.cuda.memory_reserved()
    assert (report.rounds, report.freed_bytes, report.skipped) == (1, 2 * SIZE, None)
    assert int(kept.min()) == int(kept.max()) == 7


def test_paused_memory_that_is_freed_was_no_physical_memory() -> None:
    with saver.region("a"):
        tensor = empty(SIZE)
    saver.pause("a")
    del tensor
    report = release_cached()
    assert (report.devices[0].reserved_before - report.devices[0].reserved_after, report.freed_bytes) == (SIZE, 0)


def test_a_release_is_repeated_while_it_frees_enough() -> None:
    class Last:
        """A tensor in a cycle, whose finaliser leaves one of half its size in a cycle."""

        def __init__(self, size: int) -> None:
            self.itself, self.size, self.tensor = self, size, empty(size)

        def __del__(self) -> None:
            if self.size > SIZE:
                Last(self.size // 2)

    Last(4 * SIZE)
    report = release_cached(repeat_bytes=SIZE)
    assert (report.rounds, report.freed_bytes) == (4, 4 * SIZE)
    assert report.devices[0].allocated_before - report.devices[0].allocated_after == 4 * SIZE
    assert release_cached(repeat_bytes=SIZE).rounds == 1


def test_nested_releases_inside_a_region() -> None:
    with releasing_cached() as outer:
        with saver.region("a"), releasing_cached():
            tensor = empty(SIZE)
        del tensor
        assert torch.cuda.memory_reserved() >= SIZE
    assert outer.report is not None and outer.report.freed_bytes == SIZE


@pytest.mark.parametrize("ours", [True, False])
def test_a_capture_puts_it_off_and_stays_valid(ours: bool) -> None:
    source = torch.full((MIB,), 3.0, device="cuda")
    cached = empty(SIZE)
    graph = torch.cuda.CUDAGraph()
    (source + 1).sum().item()
    del cached
    reserved = torch.cuda.memory_reserved()
    with saver.cuda_graph(graph) if ours else torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = source + 1
        report = release_cached()
    assert (report.skipped, report.rounds) == ("capture", 0)
    assert torch.cuda.memory_reserved() >= (0 if ours else reserved - SIZE)
    source.fill_(5)
    graph.replay()
    assert float(result.min()) == float(result.max()) == 6
    assert release_cached().skipped is None
    graph.reset()


@pytest.mark.outer
def test_programs_that_do_not_know_of_it() -> None:
    """Before each pause; and all the time while graphs are captured, none of which it breaks."""
    programs = [
        Program("releasing.py", (way,), (("TMS_RELEASE_CACHED", value),), preload)
        for way, value, preload in (("pauses", "pause", False), ("captures", "0.001", False), ("captures", "0.001", True))
    ]
    for finished in run_programs(programs):
        finished.check()
