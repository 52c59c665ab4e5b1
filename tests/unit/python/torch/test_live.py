"""Guards what is read from PyTorch's list of segments: the bytes that a pause copies, the record of live blocks that a
resume makes, and the blocks that managed memory has. Which of PyTorch's pools are read is in tests/torch/test_live.py."""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from core_regions import core_region
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver import _core
from torch_memory_saver._torch.memory.live_blocks import Live, ResumedBlocks, live_finder, managed_blocks
from torch_memory_saver._torch.memory.store import PoolStore

MIB = 1 << 20
ALLOCATED, PENDING, FREE = "active_allocated", "active_pending_free", "inactive"
BASE = 1 << 40
DEFAULT = (0, 0)


#: The sizes of a managed allocation: bytes requested, and bytes reserved.
Sizes = tuple[int, int]


def live_ranges(
    segments: list[dict[str, Any]], managed: dict[int, Sizes], pools: set[Any], default_stream_only: bool = False
) -> Live:
    """That of the core, with allocations by address."""
    kept = array("Q", [number for address in sorted(managed) for number in (address, *managed[address])])
    return _core.live_ranges(segments, kept.tobytes(), pools, default_stream_only)


def decoded(live: Live | None) -> tuple[list[int], list[tuple[int, int]]]:
    """Addresses and ranges."""
    assert live is not None
    addresses, ends = array("Q", live[0]), array("Q", live[1])
    return list(addresses), list(zip(ends[::2], ends[1::2], strict=True))


def used_in(live: Live | None) -> list[int]:
    """Where the requested bytes of each range end."""
    assert live is not None
    return list(array("Q", live[2]))


def segment(address: int, *blocks: tuple[int, str], pool: Any = DEFAULT, stream: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "segment_pool_id": pool,
        "stream": stream,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    } | others


# From a snapshot.


def test_used_and_pending_blocks_are_live() -> None:
    row = segment(BASE, (512, ALLOCATED), (1024, FREE), (512, PENDING), (MIB, FREE), (512, "active_awaiting_free"))
    size = row["total_size"]
    addresses, ranges = decoded(live_ranges([row], {BASE: (size, 2 * MIB)}, {DEFAULT}))
    assert addresses == [BASE]
    assert ranges == [(BASE, BASE + 512), (BASE + 1536, BASE + 2048), (BASE + size - 512, BASE + size)]


def test_a_state_that_a_later_torch_may_have_is_live() -> None:
    row = segment(BASE, (512, "reserved_for_something"), (512, FREE))
    assert decoded(live_ranges([row], {BASE: (1024, 2 * MIB)}, {DEFAULT}))[1] == [(BASE, BASE + 512)]


def test_each_block_is_a_range_of_its_own() -> None:
    first = segment(BASE, (512, FREE), (512, ALLOCATED), (1024, PENDING), (2 * MIB - 2048, ALLOCATED))
    second = segment(BASE + 2 * MIB, (512, ALLOCATED), (2 * MIB - 512, FREE))
    managed = dict.fromkeys((BASE, BASE + 2 * MIB), (2 * MIB, 2 * MIB))
    addresses, ranges = decoded(live_ranges([second, first], managed, {DEFAULT}))
    assert addresses == [BASE, BASE + 2 * MIB], "in order, whatever the snapshot's is"
    ends = [BASE + 512, BASE + 1024, BASE + 2048, BASE + 2 * MIB, BASE + 2 * MIB + 512]
    assert ranges == list(itertools.pairwise(ends))


def test_what_was_requested_of_each_block() -> None:
    states = (ALLOCATED, FREE, ALLOCATED, PENDING, ALLOCATED, ALLOCATED)
    row = segment(BASE, *zip((512, 1024, 1024, 512, 512, 512), states, strict=True))
    for block, requested in zip(row["blocks"], (500, 0, 513, 512, 0, 513), strict=True):
        block["requested_size"] = requested
    live = live_ranges([row], {BASE: (row["total_size"], 2 * MIB)}, {DEFAULT})
    begins = [begin for begin, _ in decoded(live)[1]]
    assert begins == [BASE, BASE + 1536, BASE + 2560, BASE + 3072, BASE + 3584]
    used = [end - begin for begin, end in zip(begins, used_in(live), strict=True)]
    assert used == [500, 513, 512, 512, 512], "a number that cannot be right counts as the size"


def test_a_torch_that_does_not_say_what_was_requested() -> None:
    row = segment(BASE, (512, ALLOCATED), (1024, FREE), (512, ALLOCATED))
    live = live_ranges([row], {BASE: (2048, 2 * MIB)}, {DEFAULT})
    assert used_in(live) == [end for _, end in decoded(live)[1]]


def test_a_free_segment_is_known_to_hold_nothing() -> None:
    assert decoded(live_ranges([segment(BASE, (MIB, FREE))], {BASE: (MIB, 2 * MIB)}, {DEFAULT})) == ([BASE], [])


@pytest.mark.parametrize(
    ("row", "sizes", "thinned"),
    [
        (segment(BASE, (MIB, FREE)), (2 * MIB, 2 * MIB), {DEFAULT}),
        (segment(BASE, (4 * MIB, FREE)), (2 * MIB, 2 * MIB), {DEFAULT}),
        (segment(BASE + 512, (MIB, FREE)), (MIB, 2 * MIB), {DEFAULT}),
        (segment(BASE, (MIB, FREE), pool=(0, 3)), (MIB, 2 * MIB), {DEFAULT, (0, 2)}),
        (segment(BASE, (MIB, FREE), pool=(3, 0)), (MIB, 2 * MIB), {DEFAULT, (0, 3)}),
        (segment(BASE, (MIB, FREE), pool=None), (MIB, 2 * MIB), {DEFAULT}),
    ],
    ids=["smaller than asked for", "larger", "inside", "other pool", "token", "no pool reported"],
)
def test_segments_that_are_not_thinned(row: dict[str, Any], sizes: Sizes, thinned: set[Any]) -> None:
    assert decoded(live_ranges([row], {BASE: sizes}, thinned)) == ([], [])


def test_streams_that_a_capture_may_have_used() -> None:
    rows = [segment(BASE, (MIB, FREE)), segment(BASE + 2 * MIB, (MIB, FREE), stream=7)]
    managed = {row["address"]: (MIB, 2 * MIB) for row in rows}
    assert decoded(live_ranges(rows, managed, {DEFAULT}))[0] == [BASE, BASE + 2 * MIB]
    assert decoded(live_ranges(rows, managed, {DEFAULT}, default_stream_only=True))[0] == [BASE]


REQUESTED_LESS_THAN_NOTHING = {
    "total_size": MIB,
    "blocks": [{"size": MIB, "state": ALLOCATED, "requested_size": -1}],
}


@pytest.mark.parametrize(
    ("segments", "kept", "pools", "error", "text"),
    [
        ((), 24, {DEFAULT}, TypeError, "segments must be a list"),
        ([(BASE, MIB)], 24, {DEFAULT}, TypeError, "must be a dict"),
        ([{"address": BASE}], 24, {DEFAULT}, KeyError, "total_size"),
        ([segment(BASE, (MIB, FREE)) | {"blocks": None}], 24, {DEFAULT}, TypeError, "blocks of a segment must be a list"),
        ([segment(BASE, (MIB, FREE)) | {"blocks": [{"size": MIB}]}], 24, {DEFAULT}, KeyError, "state"),
        ([segment(BASE, (MIB, FREE)) | {"address": -1}], 24, {DEFAULT}, OverflowError, "negative"),
        ([segment(BASE) | REQUESTED_LESS_THAN_NOTHING], 24, {DEFAULT}, OverflowError, "negative"),
        ([segment(BASE, (MIB, FREE))], 24, [DEFAULT], TypeError, "pools must be a set"),
        ([segment(BASE, (MIB, FREE))], 23, {DEFAULT}, ValueError, "kept must be bytes in groups of 24, not 23"),
    ],
)
def test_a_snapshot_of_another_form(segments: Any, kept: int, pools: Any, error: type[Exception], text: str) -> None:
    numbers = array("Q", (BASE, MIB, 2 * MIB)).tobytes()
    with pytest.raises(error, match=text):
        _core.live_ranges(segments, numbers[:kept], pools, False)


Blocks = list[tuple[int, str]]


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 64), st.sampled_from([ALLOCATED, PENDING, FREE])), min_size=1), max_size=6)
)
def test_ranges_hold_exactly_the_live_bytes(segments: list[Blocks]) -> None:
    rows, address = [], BASE
    for blocks in segments:
        rows.append(segment(address, *blocks))
        address += rows[-1]["total_size"]
    managed = {row["address"]: (row["total_size"], row["total_size"]) for row in rows}
    live = live_ranges(rows, managed, {DEFAULT})
    addresses, ranges = decoded(live)
    assert addresses == sorted(managed)
    assert used_in(live) == [end for _, end in ranges]
    expected: set[int] = set()
    start = BASE
    for blocks in segments:
        for size, state in blocks:
            if state != FREE:
                expected.update(range(start, start + size))
            start += size
    assert {byte for begin, end in ranges for byte in range(begin, end)} == expected
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))


# The allocations that a pause may keep.


def allocate(tag: str, size: int = 2 * MIB, backup: int = _core.BACKUP_NONE) -> int:
    with core_region(tag, backup, True):
        return _core.allocate(size, 0)


def test_allocations_that_a_pause_keeps(simulator: Any) -> None:
    made: dict[str, list[int]] = {}
    for tag, backup in (("b", _core.BACKUP_PINNED), ("a", _core.BACKUP_NONE), ("c", _core.BACKUP_DISK)):
        made[tag] = [allocate(tag, MIB + 512, backup) for _ in range(2 if tag == "b" else 1)]
    assert kept_by(None, False) == sorted(made["b"] + made["c"])
    assert kept_by(None, True) == sorted(itertools.chain(*made.values()))
    assert kept_by(("b", "a"), False) == sorted(made["b"])
    assert kept_by(("b", "a"), True) == sorted(made["a"] + made["b"])
    assert kept_by((), True) == kept_by(("none",), True) == []


def kept_by(tags: tuple[str, ...] | None, every_backup: bool) -> list[int]:
    """The addresses."""
    numbers = array("Q", _core.kept_allocations(tags, every_backup))
    assert set(zip(numbers[1::3], numbers[2::3], strict=True)) <= {(MIB + 512, 2 * MIB)}
    return list(numbers[::3])


def test_without_torch_everything_is_live(store: PoolStore) -> None:
    assert live_finder(None, store, None, True) is None


# The record of a resume, and the blocks of managed memory. PyTorch's list of segments is written by hand.


def listing(*segments: dict[str, Any]) -> Any:
    return SimpleNamespace(segments=lambda: list(segments), captures_join_regions=False, ordinary_pools=set())


def test_the_record_is_of_segments_that_are_about_to_be_resumed(simulator: Any) -> None:
    first, second = allocate("a"), allocate("b")
    rows = [
        segment(first, (MIB, ALLOCATED), (512, FREE), (512, "active_awaiting_free"), (MIB - 1024, ALLOCATED)),
        segment(second, (2 * MIB, ALLOCATED)),
    ]
    torch, resumed = listing(*rows), ResumedBlocks()
    resumed.note(torch, None)
    assert resumed.live_in(rows[0]) is None, "it is active"
    _core.pause(("a",), None)
    resumed.note(torch, ("b",))
    assert resumed.live_in(rows[0]) is None
    resumed.note(None, None)
    assert resumed.live_in(rows[0]) is None
    resumed.note(torch, ("a",))
    assert resumed.live_in(rows[0]) == {(first, MIB), (first + MIB + 1024, MIB - 1024)}
    assert resumed.live_in(rows[1]) is None
    assert resumed.live_in(rows[0] | {"total_size": 4 * MIB}) is None, "another segment has its address"
    _core.resume(None, None)
    _core.pause(("b",), None)
    resumed.note(torch, None)
    assert resumed.live_in(rows[0]) is not None, "its own resume is still the last"
    assert _core.free(first)
    resumed.note(torch, None)
    assert resumed.live_in(rows[0]) is None, "it is gone"
    _core.resume(None, None)
    resumed.after_fork_in_child()
    assert resumed.live_in(rows[1]) is None


def test_an_allocation_that_is_not_torchs_is_one_block(store: PoolStore, simulator: Any) -> None:
    """One of another library, and one whose address torch lists with another size: an older segment was there."""

    def blocks(torch: Any) -> set[tuple[int, int]]:
        return {(block.address, block.bytes) for block in managed_blocks(torch, store, ResumedBlocks(), _core.segments())}

    first, other = allocate("a"), allocate("b", 4 * MIB)
    row = segment(first, (MIB, ALLOCATED), (MIB, FREE))
    assert blocks(listing(row)) == {(first, MIB), (other, 4 * MIB)}
    assert blocks(listing(row | {"total_size": 8 * MIB})) == {(first, 2 * MIB), (other, 4 * MIB)}
    assert blocks(None) == {(first, 2 * MIB), (other, 4 * MIB)}
