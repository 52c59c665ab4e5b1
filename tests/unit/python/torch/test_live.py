"""Guards live bytes: which of torch's segments are thinned, and which of their bytes a pause copies. Guards the record of
the blocks that were live when a resume began, and which blocks managed memory has.
"""

from __future__ import annotations

import gc
import itertools
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_torch import CAPTURE_STREAM, DEFAULT, FakeGraph, FakeTorch, another_thread_inside
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver import _core
from torch_memory_saver._torch import pool_stock
from torch_memory_saver._torch.live import Live, ManagedBlock, ResumedBlocks, live_finder, managed_blocks
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
ALLOCATED, PENDING, FREE = "active_allocated", "active_pending_free", "inactive"
BASE = 1 << 40


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


def test_neighbours_are_one_range_but_not_across_segments() -> None:
    first = segment(BASE, (512, FREE), (512, ALLOCATED), (1024, PENDING), (2 * MIB - 2048, ALLOCATED))
    second = segment(BASE + 2 * MIB, (512, ALLOCATED), (2 * MIB - 512, FREE))
    managed = dict.fromkeys((BASE, BASE + 2 * MIB), (2 * MIB, 2 * MIB))
    addresses, ranges = decoded(live_ranges([second, first], managed, {DEFAULT}))
    assert addresses == [BASE, BASE + 2 * MIB], "in order, whatever the snapshot's is"
    assert ranges == [(BASE + 512, BASE + 2 * MIB), (BASE + 2 * MIB, BASE + 2 * MIB + 512)]


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
    rows = [segment(BASE, (MIB, FREE)), segment(BASE + 2 * MIB, (MIB, FREE), stream=CAPTURE_STREAM)]
    managed = {row["address"]: (MIB, 2 * MIB) for row in rows}
    assert decoded(live_ranges(rows, managed, {DEFAULT}))[0] == [BASE, BASE + 2 * MIB]
    assert decoded(live_ranges(rows, managed, {DEFAULT}, default_stream_only=True))[0] == [BASE]


@pytest.mark.parametrize(
    ("segments", "kept", "pools", "error", "text"),
    [
        ((), 24, {DEFAULT}, TypeError, "segments must be a list"),
        ([(BASE, MIB)], 24, {DEFAULT}, TypeError, "must be a dict"),
        ([{"address": BASE}], 24, {DEFAULT}, KeyError, "total_size"),
        ([segment(BASE, (MIB, FREE)) | {"blocks": None}], 24, {DEFAULT}, TypeError, "blocks of a segment must be a list"),
        ([segment(BASE, (MIB, FREE)) | {"blocks": [{"size": MIB}]}], 24, {DEFAULT}, KeyError, "state"),
        ([segment(BASE, (MIB, FREE)) | {"address": -1}], 24, {DEFAULT}, OverflowError, "negative"),
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
    addresses, ranges = decoded(live_ranges(rows, managed, {DEFAULT}))
    assert addresses == sorted(managed)
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


def test_allocations_that_a_pause_keeps(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    made: dict[str, list[int]] = {}
    for tag, backup in (("b", "host"), ("a", None), ("c", "disk"), ("b", "host")):
        with saver.region(tag, enable_cpu_backup=backup == "host", enable_disk_backup=backup == "disk"):
            made.setdefault(tag, []).append(fake_torch.allocate(MIB + 512))
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


# From torch's pools.


@pytest.fixture
def find(fake_torch: FakeTorch, store: PoolStore) -> Any:
    """The addresses that a pause of the tags would thin."""

    def addresses(*tags: str, every_backup: bool = True) -> list[int]:
        finder = live_finder(fake_torch, store, tags or None, every_backup)  # type: ignore[arg-type]
        assert finder is not None
        live = finder()
        return [] if live is None else decoded(live)[0]

    return addresses


def test_without_torch_everything_is_live(store: PoolStore) -> None:
    assert live_finder(None, store, None, True) is None


def test_pools_of_regions_are_thinned(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    made = {}
    for tag in ("a", "b", "on disk"):
        with saver.region(tag, enable_cpu_backup=tag == "a", enable_disk_backup=tag == "on disk"):
            made[tag] = fake_torch.allocate(2 * MIB)
            assert find(tag) == [made[tag]], "also while it is routed"
    assert find() == sorted(made.values())
    assert find("a") == [made["a"]]
    assert find(every_backup=False) == sorted((made["a"], made["on disk"])), "what has no backup is not asked about"
    assert find("b", every_backup=False) == []


def test_memory_of_a_retired_pool_is_thinned_until_torch_has_given_it_back(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, find: Any
) -> None:
    with saver.region("a"):
        kept, gone = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
    fake_torch.free(gone)
    saver.empty_cache()
    assert store.idle_pools() == [], "it was retired"
    assert find() == [kept]
    assert store.retired_pools()
    fake_torch.free(kept)
    saver.empty_cache()
    assert find() == []
    with saver.region("b"):
        fake_torch.allocate(2 * MIB)
    find()
    assert store.retired_pools() == frozenset(), "forgotten"


def test_too_many_retired_pools_are_forgotten(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, find: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_stock, "_MOST_RETIRED", 2)
    for _ in range(3):
        with saver.region("a"):
            kept, gone = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
        fake_torch.free(gone)
        saver.empty_cache()
    assert len(store.retired_pools()) == 1
    assert find() == [kept], "the others' memory is copied whole"


def test_pools_of_captures_are_not_thinned(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    graph = FakeGraph()
    with saver.cuda_graph(graph):
        fake_torch.allocate(2 * MIB)
    assert find() == []
    with saver.region("a"):
        address = fake_torch.allocate(2 * MIB)
    assert find() == [address]


def test_a_region_inside_a_capture_spoils_its_pool_for_good(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, find: Any
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    (pool,) = store.idle_pools()
    with saver.cuda_graph(FakeGraph()), saver.region("a"):
        fake_torch.allocate(2 * MIB)
        assert pool.id not in store.pools_without_captures(fake_torch, ())  # type: ignore[arg-type]
    assert store.idle_pools() == [pool]
    assert find("a") == []
    saver.empty_cache()
    assert find("a") == []
    with saver.region("b"):
        address = fake_torch.allocate(2 * MIB)
    assert find() == [address]


@contextmanager
def capture(fake_torch: FakeTorch, pool: Any) -> Iterator[FakeGraph]:
    """torch.cuda.graph, unknown to the package."""
    graph = FakeGraph()
    with fake_torch.capture(graph, pool, None, "global"):
        yield graph


def test_a_capture_that_is_begun_inside_a_region(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    """Before PyTorch 2.11 its memory may come from the region's pool: it lies in segments of the capture's stream."""
    fake_torch.uses[(5, 0)] = 1
    with saver.region("a"):
        before = fake_torch.allocate(2 * MIB)
        with capture(fake_torch, (5, 0)):
            captured = fake_torch.allocate(2 * MIB)
    assert (captured in [row.address for row in _core.segments()]) == fake_torch.captures_join_regions
    assert find() == [before]


def test_a_region_that_is_left_inside_a_capture(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    fake_torch.uses[(5, 0)] = 1
    with capture(fake_torch, (5, 0)), saver.region("b"):
        pass
    region = saver.region("a")
    region.__enter__()
    address = fake_torch.allocate(2 * MIB)
    assert find() == [address]
    with capture(fake_torch, (5, 0)):
        region.__exit__(None, None, None)
    assert find() == []


def test_a_pool_that_the_program_captures_into_by_its_id(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, find: Any
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    (pool,) = store.idle_pools()
    with capture(fake_torch, pool.id) as graph:
        pass
    fake_torch.release_pool(0, pool.id)  # A real graph keeps one use, not two.
    fake_torch.uses[pool.id] += 1
    assert find() == []
    del graph
    gc.collect()
    assert find() == [], "for good"


def test_other_pools_are_not_thinned(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    """One of the program's own, with managed memory as cudaMalloc gives it in a region; and torch's default pool."""
    theirs = fake_torch.new_id()
    fake_torch.uses[theirs] = 1
    fake_torch.managed[theirs] = True
    fake_torch.begin_routing(0, theirs)
    fake_torch.allocate(2 * MIB)
    fake_torch.end_routing(0, theirs)
    assert find() == []
    fake_torch.managed[DEFAULT] = True
    address = fake_torch.allocate(2 * MIB)
    assert find() == [address]


def test_another_threads_region_does_not_affect_a_pause(saver: TorchMemorySaver, fake_torch: FakeTorch, find: Any) -> None:
    with saver.region("a"):
        address = fake_torch.allocate(2 * MIB)
    with another_thread_inside(saver, fake_torch, "b"):
        assert find("a") == [address]


def test_regions_with_different_host_memory_share_no_pool(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    for _ in range(2):
        for host_memory in (None, "pool", "retain"):
            with saver.region("a", enable_cpu_backup=True, host_memory=host_memory):
                pass
    policies = {pool.key.options.host_policy for pool in store.idle_pools()}
    assert policies == {_core.HOST_DEFAULT, _core.HOST_POOL, _core.HOST_RETAIN}
    assert len(store.idle_pools()) == 3


# Through pause().


def test_a_pause_copies_live_bytes(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.region("a", enable_cpu_backup=True):
        address = fake_torch.allocate(4 * MIB)
    fake_torch.split(address, (MIB, ALLOCATED), (2 * MIB, FREE), (MIB, PENDING))
    simulator.write(address, b"\1" * MIB + b"\2" * 2 * MIB + b"\3" * MIB)
    assert saver.pause("a").copied_bytes == 2 * MIB
    assert saver.resume("a").copied_bytes == 2 * MIB
    assert simulator.read(address, MIB) == b"\1" * MIB
    assert simulator.read(address + 3 * MIB, MIB) == b"\3" * MIB
    assert saver.pause("a", live_only=False).copied_bytes == 4 * MIB
    assert saver.resume().copied_bytes == 4 * MIB


@pytest.mark.parametrize(("backup", "copied"), [(None, 0), ("host", 1), ("discard", 0)])
def test_a_pause_chooses_where_contents_go(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, backup: str | None, copied: int
) -> None:
    with saver.region("a"):
        address = fake_torch.allocate(2 * MIB)
    fake_torch.split(address, (MIB, ALLOCATED), (MIB, FREE))
    simulator.write(address, b"\7" * 2 * MIB)
    for _ in range(2):
        assert saver.pause("a", backup=backup).copied_bytes == copied * MIB
        assert saver.resume("a").copied_bytes == copied * MIB
        if copied:
            assert simulator.read(address, MIB) == b"\7" * MIB
    assert saver.pause("a").copied_bytes == 0, "the choice was for that pause only"


def test_contents_to_be_kept_can_be_discarded(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.region("a", enable_cpu_backup=True):
        address = fake_torch.allocate(2 * MIB)
    simulator.write(address, b"\7" * 2 * MIB)
    assert saver.pause("a", backup="discard").copied_bytes == 0
    assert saver.resume("a", zero=True).copied_bytes == 0
    assert simulator.read(address, 2 * MIB) == bytes(2 * MIB)


def test_idle_segments_of_a_retired_pool_are_released(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """They were in use when the pool was given up, and torch has not emptied its cache since."""
    with saver.region("a", enable_cpu_backup=True):
        gone, kept, idle = (fake_torch.allocate(2 * MIB) for _ in range(3))
    fake_torch.free(idle)
    saver.empty_cache()
    assert saver.stats().total.allocations == 2
    fake_torch.free(gone)
    report = saver.pause("a")
    assert (report.allocations, report.bytes) == (1, 2 * MIB)
    assert [row.address for row in saver.stats().allocations] == [kept]


LIVE, FREE, PENDING = "active_allocated", "inactive", "active_awaiting_free"


def allocate(saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str = "w", size: int = 2 * MIB) -> int:
    with saver.region(tag):
        return fake_torch.allocate(size)


def blocks(torch: Any, store: PoolStore, resumed: ResumedBlocks) -> list[ManagedBlock]:
    return managed_blocks(torch, store, resumed, _core.segments())


def test_the_record_is_of_segments_that_are_about_to_be_resumed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    first, second = allocate(saver, fake_torch, "a"), allocate(saver, fake_torch, "b")
    fake_torch.split(first, (MIB, LIVE), (512, FREE), (512, PENDING), (MIB - 1024, LIVE))
    resumed = ResumedBlocks()
    segments = {row["address"]: row for row in fake_torch.segments()}
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None, "it is active"
    saver.pause("a")
    resumed.note(fake_torch, ("b",))  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None
    resumed.note(None, None)
    assert resumed.live_in(segments[first]) is None
    resumed.note(fake_torch, ("a",))  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) == {(first, MIB), (first + MIB + 1024, MIB - 1024)}
    assert resumed.live_in(segments[second]) is None
    assert resumed.live_in(segments[first] | {"total_size": 4 * MIB}) is None, "another segment has its address"
    saver.resume()
    saver.pause("b")
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is not None, "its own resume is still the last"
    fake_torch.split(first)
    fake_torch.free(first)
    saver.empty_cache()
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None, "it is gone"
    saver.resume()
    resumed.after_fork_in_child()
    assert resumed.live_in(segments[second]) is None


def test_an_allocation_that_is_not_torchs_is_one_block(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    """One of another library, and one whose address torch lists with another size: an older segment was there."""
    first = allocate(saver, fake_torch)
    other = _core.allocate(3 * MIB, 0)
    fake_torch.split(first, (MIB, LIVE), (MIB, FREE))
    resumed = ResumedBlocks()
    found = blocks(fake_torch, store, resumed)
    assert {(block.address, block.bytes) for block in found} == {(first, MIB), (other, 3 * MIB)}
    assert [(block.address, block.bytes) for block in blocks(None, store, resumed)] == sorted(
        [(first, 2 * MIB), (other, 3 * MIB)]
    )
    fake_torch.rows[0].size = 8 * MIB
    assert {(block.address, block.bytes) for block in blocks(fake_torch, store, resumed)} == {
        (first, 2 * MIB),
        (other, 3 * MIB),
    }
    fake_torch.rows[0].size = 2 * MIB
    _core.free(other)


def test_all_blocks_of_a_pool_that_a_capture_has_used(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.cuda_graph(FakeGraph(), tag="graph"):  # type: ignore[arg-type]
        address = fake_torch.allocate(2 * MIB)
    fake_torch.split(address, (MIB, LIVE, {"requested_size": 100}), (MIB, FREE, {"requested_size": 7}))
    found = blocks(fake_torch, store, ResumedBlocks())
    assert [(block.address, block.bytes, block.of_graphs) for block in found] == [
        (address, 100, True),
        (address + MIB, MIB, True),
    ]
    fake_torch.free(address)


def test_frames_of_a_block(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    address = allocate(saver, fake_torch)
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    fake_torch.split(address, (MIB, LIVE, {"frames": frames}), (MIB, LIVE, {"frames": []}))
    assert [block.frames for block in blocks(fake_torch, store, ResumedBlocks())] == [frames, None]
