"""Guards the comparison: only what leaks and what is fragmented is reported as such, with the process, the stack and
the bytes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from caching_allocator import KIB, MIB, CachingAllocator
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import (
    ADAM,
    BURST,
    CACHE,
    HELD_SEGMENTS,
    KEPT,
    KEPT_BYTES,
    LEAK,
    LEAKED_BLOCKS,
    LEAKED_BYTES,
    MAIN,
    OFFLOADED,
    Program,
)

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.memory import Comparison, Snapshot, compare
from torch_memory_saver.memory.comparison import GrowthKind, StackGrowth
from torch_memory_saver.memory.comparison.drift import allocation_orders, positions
from torch_memory_saver.memory.comparison.growth import classify
from torch_memory_saver.memory.loading import parse
from torch_memory_saver.memory.model import Origin

STEPS = 4
LARGE_SEGMENT = 20 * MIB


def run(program: Program, steps: int = STEPS, **own: Any) -> list[Snapshot]:
    snapshots = []
    for _ in range(steps):
        program.step()
        snapshots.append(parse(program.allocator.snapshot(**own), ""))
    return snapshots


def innermost(rows: tuple[StackGrowth, ...]) -> list[str]:
    return [row.stack.frames[0].name for row in rows]


def findings(results: Comparison) -> tuple[list[str], list[tuple[bool, bool]]]:
    return innermost(results.leaks), [(row.usage.is_held, row.usage.unused_grows) for row in results.fragmentation]


def test_a_leak_of_small_blocks_between_large_ones() -> None:
    results = compare(*run(Program(leak=True)))
    assert findings(results) == (["to_gpu"], [])
    (leak,) = results.leaks
    assert leak.stack.frames == (LEAK, MAIN)
    assert leak.blocks == tuple(LEAKED_BLOCKS * step for step in range(1, STEPS + 1))
    assert leak.intervals == (LEAKED_BLOCKS * LEAKED_BYTES,) * (STEPS - 1)


def test_state_that_is_made_lazily_is_a_warm_up() -> None:
    results = compare(*run(Program(adam=True)))
    assert findings(results) == ([], [])
    (warm_up,) = results.warm_ups
    assert (warm_up.stack.frames, warm_up.growth) == ((*ADAM, MAIN), 8 * 16 * MIB)
    assert not warm_up.grew_last


def test_a_cache_that_fills_and_stops_is_a_warm_up() -> None:
    results = compare(*run(Program(cache=True)))
    assert findings(results) == ([], [])
    assert [row.stack.frames[0] for row in results.warm_ups] == [CACHE]


def test_segments_that_few_bytes_hold_are_fragmentation() -> None:
    results = compare(*run(Program(fragmentation=True)))
    assert findings(results) == ([], [(True, False)])
    (found,) = results.fragmentation
    assert (found.usage.held_segments[-1], found.usage.held_pieces[-1]) == (HELD_SEGMENTS, 0)
    assert found.usage.held[-1] == HELD_SEGMENTS * (LARGE_SEGMENT - KEPT_BYTES)
    (holder,) = found.holders
    assert holder.stack.frames == (KEPT, MAIN)
    assert (holder.bytes, holder.blocks, holder.segments) == (HELD_SEGMENTS * KEPT_BYTES, HELD_SEGMENTS, HELD_SEGMENTS)


def test_reserved_memory_that_grows_alone_is_fragmentation() -> None:
    results = compare(*run(Program(bursts=True)))
    assert findings(results) == ([], [(False, True)])
    usage = results.fragmentation[0].usage
    assert len(set(usage.allocated)) == 1
    assert usage.unused == tuple(r - a for r, a in zip(usage.reserved, usage.allocated, strict=True))
    assert usage.cached[-1] == usage.unused[-1]


def test_everything_at_once() -> None:
    results = compare(*run(Program(leak=True, adam=True, cache=True, fragmentation=True, offloaded=True)))
    assert findings(results) == (["to_gpu"], [(True, False)])
    assert set(innermost(results.warm_ups)) == {"_init_group", "remember"}


def test_a_program_without_problems() -> None:
    results = compare(*run(Program(offloaded=True)))
    assert findings(results) == ([], [])
    assert results.warm_ups == results.drifts == ()


def test_two_moments_name_neither_a_leak_nor_a_warm_up() -> None:
    results = compare(*run(Program(leak=True), steps=2))
    assert results.leaks == results.warm_ups == ()
    assert innermost(results.grown) == ["to_gpu"]
    assert any("Two moments" in note for note in results.notes)


def test_memory_that_falls_varies() -> None:
    assert [classify(values) for values in ((1, 3, 2), (3, 2, 1), (1, 1, 1), (1, 2), (2, 1), (1,))] == [
        GrowthKind.VARYING,
        GrowthKind.VARYING,
        GrowthKind.STEADY,
        GrowthKind.GROWN,
        GrowthKind.VARYING,
        GrowthKind.STEADY,
    ]


@given(st.lists(st.integers(0, 3), min_size=3, max_size=6))
def test_a_leak_grew_in_every_interval(values: list[int]) -> None:
    changes = [after - before for before, after in pairwise(values)]
    kind = classify(values)
    assert (kind is GrowthKind.LEAK) == all(change > 0 for change in changes)
    assert (kind is GrowthKind.WARM_UP) == (min(changes) == 0 and max(changes) > 0)


def test_growth_without_stacks_is_said_to_be_without() -> None:
    program = Program(leak=True)
    program.allocator.recording = False
    results = compare(*run(program, role="engine"))
    assert [row.stack.origin for row in results.leaks] == [Origin.UNRECORDED]
    assert any("record_history()" in note for note in results.notes)
    assert "allocated before recording" in str(results)


# ---- The allocation order, and drift


def test_blocks_rise_if_they_are_allocated_anew_over_a_leak() -> None:
    results = compare(*run(Program(leak=True, offloaded=True)))
    drift = next(row for row in results.drifts if row.stack.frames[0] == OFFLOADED)
    assert (drift.bytes, drift.blocks) == (64 * MIB, 2)
    step = LEAKED_BLOCKS * LEAKED_BYTES
    assert [after - before for before, after in pairwise(drift.positions)] == [step] * (STEPS - 1)
    assert [(stack.frames[0], size) for stack, size in drift.below] == [(LEAK, drift.rise)]
    assert results.drifts[0] is drift


def test_blocks_that_stay_do_not_drift() -> None:
    results = compare(*run(Program(leak=True)))
    assert results.drifts == ()


def test_a_position_is_the_bytes_allocated_before() -> None:
    allocator = CachingAllocator()
    first = allocator.alloc(12 * MIB, MAIN)
    second = allocator.alloc(3 * KIB, MAIN)
    allocator.free(first)
    third = allocator.alloc(12 * MIB, BURST)  # at the address of the first, but younger than the second
    snapshot = parse(allocator.snapshot(), "")
    (order,) = allocation_orders([snapshot], 0)
    assert third == first
    assert [block.address for block in order] == [second, third]
    assert positions(order) == [0, 3 * KIB]


def test_blocks_without_an_event_are_the_oldest_and_keep_their_order() -> None:
    allocator = CachingAllocator(max_entries=6)
    freed = allocator.alloc(12 * MIB, MAIN)
    small = [allocator.alloc(KIB, BURST) for _ in range(2)]
    allocator.free(freed)
    large = allocator.alloc(12 * MIB, MAIN)  # younger, at a lower address
    before = parse(allocator.snapshot(), "")
    for _ in range(4):
        allocator.free(allocator.alloc(2 * KIB, BURST))  # the history has no room for older events
    late = allocator.alloc(KIB, LEAK)
    after = parse(allocator.snapshot(), "")
    orders = allocation_orders([before, after], 0)
    assert [block.address for block in orders[0]] == [*small, large]
    assert [block.address for block in orders[1]] == [*small, large, late]
    alone = allocation_orders([after], 0)[0]
    assert [block.address for block in alone] == [*sorted([large, *small]), late]


def test_blocks_lost_from_the_history_do_not_make_others_drift() -> None:
    snapshots = run(Program(leak=True, allocator=CachingAllocator(max_entries=8)))
    assert compare(*snapshots).drifts == ()


# ---- Properties

_CALLS = st.sampled_from([MAIN, LEAK, BURST])
_OPERATIONS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "await"]), st.integers(1, 14 * MIB), _CALLS), max_size=40)


def perform(allocator: CachingAllocator, operations: list[tuple[str, int, Any]], live: list[int]) -> None:
    for action, size, call in operations:
        if action == "alloc":
            live.append(allocator.alloc(size, call))
        elif live:
            allocator.free(live.pop(size % len(live)), awaiting=action == "await")


@settings(max_examples=40, deadline=None)
@given(st.lists(_OPERATIONS, min_size=1, max_size=4))
def test_bytes_add_up(moments: list[list[tuple[str, int, Any]]]) -> None:
    allocator, live, snapshots = CachingAllocator(), [], []
    contents = []
    for operations in moments:
        perform(allocator, operations, live)
        contents.append(allocator.snapshot())
        snapshots.append(parse(contents[-1], ""))
    results = compare(*snapshots)
    active = [sum(segment["active_size"] for segment in content["segments"]) for content in contents]
    for number, expected in enumerate(active):
        assert sum(growth.bytes[number] for growth in results.growths) == expected
    for usage in results.processes:
        for number, content in enumerate(contents):
            allocated = sum(segment["allocated_size"] for segment in content["segments"])
            assert usage.allocated[number] == allocated
            assert usage.allocated[number] + usage.awaiting_free[number] == active[number]
            assert usage.reserved[number] == sum(segment["total_size"] for segment in content["segments"])
            assert usage.held[number] + usage.cached[number] <= usage.unused[number]
            assert usage.unused[number] == usage.reserved[number] - allocated


@settings(max_examples=40, deadline=None)
@given(_OPERATIONS)
def test_positions_have_the_bytes_of_older_blocks_below(operations: list[tuple[str, int, Any]]) -> None:
    allocator, live = CachingAllocator(), []
    perform(allocator, operations, live)
    snapshot = parse(allocator.snapshot(), "")
    (order,) = allocation_orders([snapshot], 0)
    assert sorted(block.address for block in order) == [block.address for block in snapshot.live_blocks(0)]
    at = {event.address: number for number, event in enumerate(snapshot.events.get(0, ())) if event.action == "alloc"}
    numbers = [at[block.address] for block in order]
    assert numbers == sorted(numbers)


# ---- Which snapshots are of one process


def write_moments(folder: Path, programs: dict[str, Program], steps: int = 3) -> Path:
    for step in range(8, 8 + steps):
        for number, (role, program) in enumerate(programs.items()):
            program.step()
            place = folder / f"step-{step}" / f"{role}-{number}.pickle"
            program.allocator.write(place, role=role.split(".")[0], pid=100 + number, step=step)
    return folder


def test_the_process_that_leaks_comes_first(tmp_path: Path) -> None:
    programs = {"detokenizer": Program(), "scheduler": Program(fragmentation=True), "tokenizer": Program(leak=True)}
    results = compare(write_moments(tmp_path, programs))
    assert [usage.process.role for usage in results.processes] == ["tokenizer", "scheduler", "detokenizer"]
    assert [leak.process.role for leak in results.leaks] == ["tokenizer"]
    assert results.moments == ("step 8", "step 9", "step 10")


def test_processes_of_one_role_are_told_apart_by_their_pids(tmp_path: Path) -> None:
    results = compare(write_moments(tmp_path, {"worker.1": Program(), "worker.2": Program(leak=True)}))
    assert [usage.process.pid for usage in results.processes] == [101, 100]
    assert [len(usage.moments) for usage in results.processes] == [3, 3]


def test_a_process_that_was_restarted_is_matched_by_role_and_rank(tmp_path: Path) -> None:
    program = Program(leak=True)
    for step in range(3):
        program.step()
        program.allocator.write(tmp_path / str(step) / "a.pickle", role="trainer", rank=2, pid=step, step=step)
    results = compare(tmp_path)
    assert [(usage.process.rank, usage.moments) for usage in results.processes] == [(2, (0, 1, 2))]
    assert len(results.leaks) == 1


def test_files_without_a_process_are_matched_by_name(tmp_path: Path) -> None:
    programs = {"rank0": Program(), "rank1": Program(leak=True)}
    for step in range(3):
        for name, program in programs.items():
            program.step()
            program.allocator.write(tmp_path / f"step-{step}" / f"{name}.pickle")
    results = compare(tmp_path)
    assert [usage.process.file for usage in results.processes] == ["rank1", "rank0"]


def test_a_process_that_a_moment_lacks(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": Program(leak=True), "engine": Program()}, steps=4)
    (folder / "step-9" / "trainer-0.pickle").unlink()
    results = compare(folder)
    assert results.processes[0].moments == (0, 2, 3)
    assert [note for note in results.notes if "trainer" in note and "step 9" in note]


def test_the_order_of_files_within_a_moment_does_not_matter(tmp_path: Path) -> None:
    folder = write_moments(tmp_path / "a", {"trainer": Program(leak=True), "engine": Program(cache=True)})
    files = [sorted(step.iterdir()) for step in sorted(folder.iterdir(), key=lambda path: int(path.name[5:]))]
    by_moment = compare(*(file for moment in files for file in moment))
    reversed_files = compare(*(file for moment in files for file in reversed(moment)))
    by_process = compare(*(moment[number] for number in range(2) for moment in files))
    assert by_moment == reversed_files == by_process == compare(folder)


def test_folders_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": Program(leak=True)})
    assert compare(folder).leaks[0].blocks == (6, 12, 18)


def test_files_that_are_being_written_are_left_out(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": Program()})
    (folder / "step-9" / ".trainer.pickle").write_bytes(b"half")
    shutil.copy(folder / "step-9" / "trainer-0.pickle", folder / ".x.pickle")
    assert len(compare(folder).moments) == 3


def test_inputs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no snapshot"):
        compare()
    with pytest.raises(InvalidArgumentError, match=str(tmp_path)):
        compare(tmp_path)


def test_two_snapshots_of_one_process_and_moment(tmp_path: Path) -> None:
    content = CachingAllocator().snapshot(role="trainer", pid=1)
    moment = compare(parse(content, ""), parse(content, ""))
    assert len(moment.moments) == 2


def test_paused_segments_hold_no_memory() -> None:
    program = Program(fragmentation=True)
    program.step()
    segments = program.allocator.snapshot()["segments"]
    managed = [
        {"address": row["address"], "bytes": row["total_size"], "device": 0, "state": "paused", "tag": "kv"}
        for row in segments
    ]
    snapshot = parse(program.allocator.snapshot(segments=managed), "")
    usage = compare(snapshot).processes[0]
    assert usage.paused == usage.reserved
    assert (usage.held, usage.cached, usage.unused) == ((0,), (0,), (0,))


def test_the_devices_of_a_process_are_apart() -> None:
    snapshots = []
    programs = Program(leak=True), Program(allocator=CachingAllocator(device=1))
    for _ in range(3):
        contents = []
        for program in programs:
            program.step()
            contents.append(program.allocator.snapshot())
        merged = {"segments": contents[0]["segments"] + contents[1]["segments"]}
        snapshots.append(parse(merged, ""))
    results = compare(*snapshots)
    assert [usage.device for usage in results.processes] == [0, 1]
    assert [leak.device for leak in results.leaks] == [0]


def test_a_larger_block_for_the_same_request_is_no_growth() -> None:
    allocator, snapshots = CachingAllocator(), []
    for cached in (16 * MIB, 14 * MIB, 14 * MIB):
        allocator.free(allocator.alloc(cached, BURST))
        kept = allocator.alloc(27 * MIB // 2, LEAK)  # a rest of up to 1 MiB is not split off
        snapshots.append(parse(allocator.snapshot(), ""))
        allocator.free(kept)
        allocator.empty_cache()
    (growth,) = compare(*snapshots).growths
    assert growth.bytes == (27 * MIB // 2, 14 * MIB, 14 * MIB)
    assert growth.requested_bytes == (27 * MIB // 2,) * 3
    assert growth.kind is GrowthKind.STEADY
