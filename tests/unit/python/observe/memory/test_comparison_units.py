"""Guards what of an expandable segment counts as cached and as held: PyTorch gives single pieces of it back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from snapshots import MIB

from torch_memory_saver.observe.memory import Snapshot, compare
from torch_memory_saver.observe.memory.comparison.fragmentation import units
from torch_memory_saver.observe.memory.snapshot_reader import parse


def expandable(size: int, *live: tuple[int, int], kind: str = "large") -> Snapshot:
    """A snapshot of one expandable segment, whose live blocks are given by offset and size."""
    blocks, end = [], 0
    for offset, length in live:
        blocks += [(end, offset - end, "inactive"), (offset, length, "active_allocated")]
        end = offset + length
    blocks.append((end, size - end, "inactive"))
    rows = [{"address": at, "size": length, "state": state} for at, length, state in blocks if length]
    segment = {"device": 0, "address": 0, "total_size": size, "segment_type": kind, "is_expandable": True, "blocks": rows}
    return parse({"segments": [segment]}, "")


def unused_of(snapshot: Snapshot) -> tuple[int, int, int]:
    """Its cached bytes, its held bytes, and the number of held pieces."""
    (usage,) = compare(snapshot).processes
    return usage.cached[0], usage.held[0], usage.held_segments[0]


def test_free_pieces_of_an_expandable_segment_are_cached() -> None:
    assert unused_of(expandable(100 * MIB, (0, 30 * MIB))) == (60 * MIB, 0, 0)
    assert unused_of(expandable(100 * MIB, (0, 20 * MIB), (80 * MIB, 20 * MIB))) == (60 * MIB, 0, 0)
    assert unused_of(expandable(100 * MIB)) == (100 * MIB, 0, 0)
    assert unused_of(expandable(8 * MIB, (0, MIB), kind="small")) == (6 * MIB, 0, 0)


def test_pieces_that_few_bytes_keep_are_held() -> None:
    assert unused_of(expandable(60 * MIB, (28 * MIB, MIB))) == (40 * MIB, 19 * MIB, 1)
    across = expandable(60 * MIB, (19 * MIB, 2 * MIB))
    assert unused_of(across) == (20 * MIB, 38 * MIB, 2)
    (found,) = compare(across).fragmentation
    (holder,) = found.holders
    assert (holder.bytes, holder.blocks, holder.segments, holder.held) == (2 * MIB, 1, 2, 38 * MIB)
    assert found.usage.held_pieces == (2,)
    text = str(compare(across))
    assert "38.0 unused in 2 pieces of expandable segments that are less than 25% in use" in text
    assert "38.0 held in 2 pieces of expandable segments by 1 block of 2.0 in all" in text


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 45)), max_size=6), st.sampled_from(["small", "large"]))
def test_every_byte_of_an_expandable_segment_is_counted_once(gaps: list[tuple[int, int]], kind: str) -> None:
    live, end = [], 0
    for gap, length in gaps:
        live.append(((end + gap) * MIB, length * MIB))
        end += gap + length
    piece = 20 if kind == "large" else 2
    size = -(-(end + 1) // piece) * piece * MIB
    snapshot = expandable(size, *live, kind=kind)
    parts = list(units(snapshot.segments))
    assert {part.bytes for part in parts} == {piece * MIB}
    assert sum(part.bytes for part in parts) == size
    assert sum(part.live_bytes for part in parts) == sum(length for _, length in live)
    cached, held, _ = unused_of(snapshot)
    assert cached + held <= size - sum(length for _, length in live)
