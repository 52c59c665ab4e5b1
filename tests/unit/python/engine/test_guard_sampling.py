"""Guards the samples of check_fresh(): which bytes they are, that none is copied twice, and what counts as unwritten."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver._engine.tensors import freshness
from torch_memory_saver._engine.tensors.freshness import PART_BYTES, PARTS, Piece, Sampled, sample

BASE = 1 << 40
PATTERN = 0xFF


class Memory:
    """Bytes from BASE on; what is beyond is not resident."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.calls: list[list[tuple[int, int]]] = []

    def count(self, ranges: bytes) -> Sequence[int | None]:
        ends = array("Q", ranges)
        pairs = [(begin - BASE, end - BASE) for begin, end in zip(ends[::2], ends[1::2], strict=True)]
        assert all(begin < end for begin, end in pairs)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(pairs)), "in order, and apart"
        self.calls.append(pairs)
        return [self.data[begin:end].count(PATTERN) if end <= len(self.data) else None for begin, end in pairs]


def look(data: bytes, *pieces: tuple[int, int, bool]) -> tuple[list[Sampled | None], int, Memory]:
    memory = Memory(data)
    found, copied = sample([Piece(BASE + begin, size, whole) for begin, size, whole in pieces], memory.count)
    return found, copied, memory


@pytest.mark.parametrize("size", [1, 4, 63, 64, 65, 300, PARTS * PART_BYTES])
def test_small_pieces_are_read_from_end_to_end(size: int) -> None:
    for whole in (False, True):
        found, copied, _ = look(b"\xff" * size, (0, size, whole))
        assert found == [Sampled(size, size)]
        assert copied == size
    found, _, _ = look(b"\xff" * (size - 1) + b"\0", (0, size, False))
    assert found == [Sampled(size, (size - 1) // PART_BYTES * PART_BYTES)], "the last part is written"


def test_samples_lie_at_the_begin_at_the_end_and_evenly_between() -> None:
    size = 100_000
    _, copied, memory = look(bytes(size), (0, size, False))
    ((*ranges,),) = memory.calls
    assert copied == PARTS * PART_BYTES
    assert len(ranges) == PARTS
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(begin % 16 == 0 for begin, _ in ranges[:-1])
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(ranges)]
    assert max(steps) - min(steps) <= 2 * 16


@pytest.mark.parametrize("missing", range(PARTS))
def test_a_shard_that_is_missing_is_met(missing: int) -> None:
    shard = 4096
    data = b"".join((b"\xff" if number == missing else b"\1") * shard for number in range(PARTS))
    (found,), _, _ = look(data, (0, len(data), False))
    assert found is not None
    assert 0 < found.unwritten < found.examined


def test_single_bytes_of_that_value_are_data() -> None:
    data = (b"\xff" * (PART_BYTES - 1) + b"\0") * 1000
    for whole in (False, True):
        (found,), _, _ = look(data, (0, len(data), whole))
        assert found is not None
        assert found.unwritten == 0


def test_a_whole_piece_finds_what_samples_miss() -> None:
    data = bytearray(1 << 20)
    data[8192:16384] = b"\xff" * 8192
    (sampled, whole), copied, _ = look(bytes(data), (0, len(data), False), (0, len(data), True))
    assert sampled == Sampled(PARTS * PART_BYTES, 0)
    assert whole == Sampled(len(data), 8192)
    assert copied == len(data)


def test_what_is_not_resident_has_no_result() -> None:
    found, copied, _ = look(b"\xff" * 1000, (0, 1000, False), (900, 200, False), (5000, 10, True))
    assert found[0] == Sampled(PARTS * PART_BYTES, PARTS * PART_BYTES)
    assert found[1:] == [None, None]
    assert copied <= 1000


def test_nothing_to_look_at_is_one_call() -> None:
    """It checks for captures, and warns of unknown tags."""
    found, copied, memory = look(b"")
    assert (found, copied, memory.calls) == ([], 0, [[]])


def test_large_pieces_are_read_by_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "_CALL_BYTES", 10_000)
    data = b"\xff" * 35_000 + b"\0" * 5_000
    found, copied, memory = look(data, (0, 40_000, True), (100, 39_000, False), (20_000, 2_000, True))
    assert copied == 40_000
    assert found[2] == Sampled(2_000, 2_000)
    assert found[0] is not None
    assert 35_000 - 4096 <= found[0].unwritten <= 35_000
    sizes = [sum(end - begin for begin, end in call) for call in memory.calls]
    assert len(sizes) >= 4
    assert max(sizes) <= 10_000


PIECES = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 3000), st.booleans()), max_size=8)


@given(st.lists(st.sampled_from([b"\xff" * 70, b"\0", b"\xff\0", b"\xff" * 700]), max_size=40).map(b"".join), PIECES)
def test_overlapping_pieces_are_counted_as_each_alone(data: bytes, pieces: list[tuple[int, int, bool]]) -> None:
    together, copied, memory = look(data, *pieces)
    assert together == [look(data, piece)[0][0] for piece in pieces]
    assert copied == sum(end - begin for call in memory.calls for begin, end in call if end <= len(data))
    for (begin, size, whole), found in zip(pieces, together, strict=True):
        if found is not None and (whole or size <= PARTS * PART_BYTES):
            assert found.examined == size
        if found is not None and data[begin : begin + size].count(PATTERN) == size:
            assert found.unwritten == found.examined
