"""Guards slack: memory of a tensor that was freed beside others with which it shared a physical handle. It is reported, used
again, gone after a pause, and there is none where a region or its history excludes it."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from gpu_support import (
    MIB,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    saver,
    take_all_but,
    torch,
    write_and_check,
)

#: Of a tensor: PyTorch makes a segment for each.
SIZE = 24 * MIB
#: So many that the last ones have neighbours.
COUNT = 8
#: What other processes, and the driver's bookkeeping, may move meanwhile.
TOLERANCE = 8 * MIB

_numbers = itertools.count()


class Pieces:
    """Tensors of a tag of their own, which have lived through a pause, with random contents. Each test has another tag:
    what the memory of a tag gets depends on its history."""

    def __init__(self, kept: bool = False, runs: bool = True) -> None:
        self.tag = f"pieces {next(_numbers)}"
        self._options = {"enable_cpu_backup": kept, "runs": runs}
        self.tensors = [self.allocate() for _ in range(COUNT)]
        self.cycle()
        self.fill()

    def allocate(self) -> torch.Tensor:
        with saver.region(tag=self.tag, **self._options):
            return empty(SIZE)

    def cycle(self, backup: Literal["host"] | None = None) -> None:
        saver.pause(self.tag, backup=backup)
        saver.resume(self.tag)

    def fill(self) -> None:
        for seed, tensor in enumerate(self.tensors):
            fill_random(tensor, seed)
        self.sums = [checksum(tensor) for tensor in self.tensors]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    def free(self, *indices: int) -> None:
        """Frees some, and has PyTorch give their memory back."""
        kept = [index for index in range(len(self.tensors)) if index not in [each % len(self.tensors) for each in indices]]
        self.tensors, self.sums, self.addresses = (
            [values[index] for index in kept] for values in (self.tensors, self.sums, self.addresses)
        )
        saver.empty_cache()

    def assert_unchanged(self) -> None:
        assert [tensor.data_ptr() for tensor in self.tensors] == self.addresses
        assert [checksum(tensor) for tensor in self.tensors] == self.sums

    @property
    def slack(self) -> int:
        return saver.stats(self.tag).total.slack_bytes

    @property
    def resident(self) -> int:
        return saver.stats(self.tag).total.resident_bytes


def test_slack_after_a_free_is_reported_and_used_again() -> None:
    pieces = Pieces()
    assert (pieces.slack, pieces.resident) == (0, COUNT * SIZE)
    before = free_bytes()
    pieces.free(-2)
    assert (pieces.slack, pieces.resident) == (SIZE, (COUNT - 1) * SIZE)
    assert_close_to(free_bytes(), before, "free memory after the free", slack=TOLERANCE)
    stats = saver.stats()
    assert stats.slack_bytes >= stats.devices[0].slack_bytes >= SIZE
    pieces.assert_unchanged()
    again = pieces.allocate()
    assert (pieces.slack, pieces.resident) == (0, COUNT * SIZE)
    assert_close_to(free_bytes(), before, "free memory after the next allocation", slack=TOLERANCE)
    write_and_check(again, 7)
    pieces.assert_unchanged()


@pytest.mark.parametrize("kept", [False, True])
def test_a_pause_returns_slack_and_a_resume_maps_none(kept: bool) -> None:
    pieces = Pieces(kept)
    before = free_bytes()
    pieces.free(-2)
    saver.pause(pieces.tag)
    assert (pieces.slack, pieces.resident) == (0, 0)
    assert_close_to(free_bytes() - before, COUNT * SIZE, "memory that the pause returned", slack=TOLERANCE)
    saver.resume(pieces.tag)
    assert (pieces.slack, pieces.resident) == (0, (COUNT - 1) * SIZE)
    assert_close_to(free_bytes() - before, SIZE, "memory that stays free", slack=TOLERANCE)
    if kept:
        pieces.assert_unchanged()


@pytest.mark.parametrize("kept", [False, True])
def test_a_pause_with_a_backup_keeps_contents(kept: bool) -> None:
    """Also of memory whose contents a pause discards otherwise."""
    pieces = Pieces(kept)
    before = free_bytes()
    pieces.free(-2)
    pieces.cycle(backup="host")
    assert (pieces.slack, pieces.resident) == (0, (COUNT - 1) * SIZE)
    assert_close_to(free_bytes() - before, SIZE, "memory that was returned", slack=TOLERANCE)
    pieces.assert_unchanged()


def test_a_pause_returns_what_torch_only_caches() -> None:
    pieces = Pieces()
    before = free_bytes()
    del pieces.tensors[-2], pieces.sums[-2], pieces.addresses[-2]
    assert pieces.slack == 0, "PyTorch still has it"
    pieces.cycle(backup="host")
    assert_close_to(free_bytes() - before, SIZE, "memory that was returned", slack=TOLERANCE)
    pieces.assert_unchanged()


def test_a_graph_is_replayed_after_slack_was_returned() -> None:
    pieces = Pieces()
    graph, tag = torch.cuda.CUDAGraph(), f"{pieces.tag}: graph"
    torch.cuda.synchronize()
    with saver.cuda_graph(graph, tag=tag):
        output = pieces.tensors[-1].view(torch.int64) ^ 1
    graph.replay()
    expected = checksum(output.view(torch.uint8))
    pieces.free(-2)
    pieces.cycle(backup="host")
    output.zero_()
    graph.replay()
    assert checksum(output.view(torch.uint8)) == expected
    pieces.assert_unchanged()
    del graph, output


def test_a_region_without_runs_has_no_slack() -> None:
    pieces = Pieces(runs=False)
    before = free_bytes()
    pieces.free(-2)
    assert (pieces.slack, pieces.resident) == (0, (COUNT - 1) * SIZE)
    assert_close_to(free_bytes() - before, SIZE, "memory that was returned", slack=TOLERANCE)


def test_a_tag_that_churns_has_no_slack_from_its_second_cycle_on() -> None:
    pieces = Pieces()
    for cycle in range(4):
        before = free_bytes()
        pieces.free(-2, -3)  # a quarter
        slack = 2 * SIZE if cycle == 0 else 0
        assert pieces.slack == slack
        assert_close_to(free_bytes() - before, 2 * SIZE - slack, "memory that was returned", slack=TOLERANCE)
        pieces.tensors += [pieces.allocate(), pieces.allocate()]
        pieces.cycle()
        pieces.fill()


def test_an_out_of_memory_error_names_slack_and_what_returns_it() -> None:
    pieces = Pieces()
    with saver.region(tag="resumed"):
        resumed = empty(4 * SIZE)
    saver.pause("resumed")
    pieces.free(-2)
    other = take_all_but(3 * SIZE + SIZE // 2)
    with pytest.raises(errors.OutOfMemoryError) as caught:
        saver.resume("resumed")
    message = str(caught.value)
    assert "are slack" in message and f"'{pieces.tag}'" in message and "resume(tag)" in message
    assert core.find(resumed.data_ptr()).state == core.STATE_PAUSED
    pieces.cycle(backup="host")
    saver.resume("resumed")
    write_and_check(resumed, 3)
    del other


@pytest.mark.multigpu
def test_slack_is_of_a_device() -> None:
    tag = f"pieces {next(_numbers)}"
    with saver.region(tag=tag):
        tensors = [[empty(SIZE, device) for _ in range(COUNT)] for device in range(2)]
    saver.pause(tag)
    saver.resume(tag)
    for number, tensor in enumerate(tensors[0] + tensors[1]):
        tensor.fill_(number)
    del tensor, tensors[1][-2]
    saver.empty_cache()
    assert [saver.stats(tag, device).total.slack_bytes for device in range(2)] == [0, SIZE]
    saver.pause(tag, backup="host")
    saver.resume(tag)
    assert saver.stats(tag).total.slack_bytes == 0
    values = [int(tensor.max()) for tensor in tensors[0] + tensors[1]]
    assert values == [number for number in range(2 * COUNT) if number != 2 * COUNT - 2]
