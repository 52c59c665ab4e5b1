"""Guards the comparison: only what leaks and what is fragmented is reported as such, with the process, the stack and
the bytes. PyTorch's own snapshots of a program with planted problems are in test_recorded_snapshots.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import (
    ALLOCATED,
    AWAITING_FREE,
    INACTIVE,
    KIB,
    MIB,
    Call,
    Row,
    allocation,
    block,
    deletion,
    free,
    recorded,
    segment,
    snapshot,
    write,
)

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.memory import compare
from torch_memory_saver.observe.memory.comparison.drift import allocation_orders, positions
from torch_memory_saver.observe.memory.comparison.growth import GrowthKind, classify
from torch_memory_saver.observe.memory.model import Origin
from torch_memory_saver.observe.memory.snapshot_reader import parse

BASE = 1 << 40
MAIN: Call = ("/srv/engine/main.py", 10, "main")
LEAK: Call = ("/srv/engine/images.py", 88, "to_gpu")
KEPT: Call = ("/srv/engine/batch.py", 9, "keep_header")


def steady(step: int = 0) -> list[Row]:
    return [segment(BASE, block(16 * MIB, MAIN))]


def leaking(step: int) -> list[Row]:
    return [*steady(), segment(BASE + 64 * MIB, *[block(MIB, LEAK, MAIN)] * (step + 1), free(MIB))]


def held(step: int = 0) -> list[Row]:
    """Segments of 20 MiB, each held by a block of 2 MiB."""
    return [*steady(), *(segment(BASE + number * 64 * MIB, block(2 * MIB, KEPT), free(18 * MIB)) for number in (1, 2))]


# ---- Growth and unused memory


def test_reserved_memory_that_grows_alone_is_fragmentation() -> None:
    moments = [snapshot(*steady(), segment(BASE + 64 * MIB, free((step + 1) * 40 * MIB))) for step in range(4)]
    results = compare(*(parse(content, "") for content in moments))
    assert results.leaks == ()
    (found,) = results.fragmentation
    assert (found.usage.is_held, found.usage.unused_grows) == (False, True)
    assert found.usage.allocated == (16 * MIB,) * 4
    assert found.usage.cached == found.usage.unused == tuple(step * 40 * MIB for step in (1, 2, 3, 4))


def test_a_program_without_problems() -> None:
    """It allocates a block again in each step."""

    def content(step: int) -> Row:
        loaded = BASE + (64 if step % 2 else 128) * MIB
        events = [allocation(BASE, 16 * MIB, MAIN), allocation(loaded, 8 * MIB, LEAK)]
        return snapshot(*steady(), segment(loaded, block(8 * MIB, LEAK)), events=events)

    results = compare(*(parse(content(step), "") for step in range(4)))
    assert not (results.leaks or results.warm_ups or results.fragmentation or results.drifts)


def test_two_moments_name_neither_a_leak_nor_a_warm_up() -> None:
    results = compare(*(parse(snapshot(*leaking(step)), "") for step in range(2)))
    assert results.leaks == results.warm_ups == ()
    assert [row.stack.frames[0] for row in results.grown] == [LEAK]
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


@given(st.lists(st.integers(0, 3), min_size=3, max_size=9))
def test_a_leak_never_fell_and_grew_more_than_once(values: list[int]) -> None:
    changes = [after - before for before, after in pairwise(values)]
    kind = classify(values)
    assert (kind in (GrowthKind.LEAK, GrowthKind.WARM_UP)) == (min(changes) == 0 < max(changes) or min(changes) > 0)
    if kind is GrowthKind.LEAK:
        assert sum(change > 0 for change in changes) >= 2
    if min(changes) >= 0 and sum(change > 0 for change in changes) >= 2 and any(changes[-(len(values) // 3) :]):
        assert kind is GrowthKind.LEAK, "it grew in the last third"


def test_growth_without_stacks_is_said_to_be_without() -> None:
    moments = [segment(BASE, *[block(MIB)] * (step + 1)) for step in range(3)]
    results = compare(*(parse(snapshot(row, recording=False, role="engine"), "") for row in moments))
    assert [row.stack.origin for row in results.leaks] == [Origin.UNRECORDED]
    assert any("use `run --record snapshots,history`, or call record_history()," in note for note in results.notes)
    assert "allocated before recording" in str(results)


def test_a_larger_block_for_the_same_request_is_no_growth() -> None:
    """PyTorch does not split a small rest off."""
    moments = [segment(BASE, block(size * MIB, LEAK, requested=27 * MIB // 2), free(20 * MIB)) for size in (14, 16, 16)]
    (growth,) = compare(*(parse(snapshot(row), "") for row in moments)).growths
    assert growth.bytes == (14 * MIB, 16 * MIB, 16 * MIB)
    assert growth.requested_bytes == (27 * MIB // 2,) * 3
    assert growth.kind is GrowthKind.STEADY


def test_paused_segments_hold_no_memory() -> None:
    rows = held()
    managed = [
        {"address": row["address"], "bytes": row["total_size"], "device": 0, "state": "paused", "tag": "kv"} for row in rows
    ]
    usage = compare(parse(snapshot(*rows, segments=managed), "")).processes[0]
    assert usage.paused == usage.reserved == (56 * MIB,)
    assert (usage.held, usage.cached, usage.unused) == ((0,), (0,), (0,))


def test_the_devices_of_a_process_are_apart() -> None:
    other = segment(BASE, block(16 * MIB, MAIN), device=1)
    results = compare(*(parse(snapshot(*leaking(step), other), "") for step in range(3)))
    assert [usage.device for usage in results.processes] == [0, 1]
    assert [leak.device for leak in results.leaks] == [0]


# ---- The allocation order, and drift


def test_blocks_that_stay_do_not_drift() -> None:
    assert compare(*(parse(snapshot(*leaking(step)), "") for step in range(4))).drifts == ()


def test_a_position_is_the_bytes_allocated_before() -> None:
    """A block at the address of an older one, which was freed, is younger than its neighbour."""
    first, second = BASE, BASE + 64 * MIB
    events = [
        allocation(first, 12 * MIB, MAIN),
        allocation(second, 3 * KIB, MAIN),
        *deletion(first, 12 * MIB),
        allocation(first, 12 * MIB, MAIN),
    ]
    segments = segment(first, block(12 * MIB, MAIN)), segment(second, block(3 * KIB, MAIN), free(KIB))
    (order,) = allocation_orders([parse(snapshot(*segments, events=events), "")], 0)
    assert [each.address for each in order] == [second, first]
    assert positions(order) == [0, 3 * KIB]


def test_blocks_without_an_event_are_the_oldest_and_keep_their_order() -> None:
    large, small, late = BASE, [BASE + 64 * MIB, BASE + 64 * MIB + KIB], BASE + 64 * MIB + 2 * KIB
    first = segment(large, block(12 * MIB, MAIN))
    known = [*(allocation(address, KIB, LEAK) for address in small), allocation(large, 12 * MIB, MAIN)]
    before = parse(snapshot(first, segment(small[0], *[block(KIB, LEAK)] * 2, free(KIB)), events=known), "")
    # The history has no room for the older events any more.
    after = parse(
        snapshot(first, segment(small[0], *[block(KIB, LEAK)] * 3), events=[allocation(late, KIB, LEAK)]),
        "",
    )
    orders = allocation_orders([before, after], 0)
    assert [each.address for each in orders[0]] == [*small, large]
    assert [each.address for each in orders[1]] == [*small, large, late]
    assert [each.address for each in allocation_orders([after], 0)[0]] == [large, *small, late]


def test_blocks_lost_from_the_history_do_not_make_others_drift() -> None:
    """PyTorch keeps the last events, so a smaller limit gives the end of the same history."""
    moments = recorded()
    for content in moments:
        content["device_traces"] = [trace[-8:] for trace in content["device_traces"]]
    assert [row.stack for row in compare(*(parse(content, "") for content in recorded())).drifts]
    assert compare(*(parse(content, "") for content in moments)).drifts == ()


# ---- Properties

_BLOCKS = st.lists(
    st.tuples(st.integers(1, 64), st.sampled_from([MAIN, LEAK]), st.sampled_from([ALLOCATED, AWAITING_FREE, INACTIVE])),
    min_size=1,
    max_size=8,
)
_SEGMENTS = st.lists(_BLOCKS, max_size=6)


def written(segments: list[list[tuple[int, Call, str]]]) -> list[Row]:
    return [
        segment(BASE + number * MIB, *(block(size * 512, call, state=state) for size, call, state in blocks))
        for number, blocks in enumerate(segments)
    ]


@settings(max_examples=40)
@given(st.lists(_SEGMENTS, min_size=1, max_size=4))
def test_bytes_add_up(moments: list[Any]) -> None:
    def total(rows: list[Row], *states: str) -> int:
        return sum(each["size"] for row in rows for each in row["blocks"] if each["state"] in states)

    contents = [written(segments) for segments in moments]
    results = compare(*(parse(snapshot(*rows), "") for rows in contents))
    for number, rows in enumerate(contents):
        assert sum(growth.bytes[number] for growth in results.growths) == total(rows, ALLOCATED, AWAITING_FREE)
        for usage in results.processes:
            assert usage.allocated[number] == total(rows, ALLOCATED)
            assert usage.awaiting_free[number] == total(rows, AWAITING_FREE)
            assert usage.reserved[number] == sum(row["total_size"] for row in rows)
            assert usage.held[number] + usage.cached[number] <= usage.unused[number]
            assert usage.unused[number] == usage.reserved[number] - usage.allocated[number]


@settings(max_examples=40)
@given(_SEGMENTS, st.randoms(use_true_random=False))
def test_positions_have_the_bytes_of_older_blocks_below(segments: Any, random: Any) -> None:
    rows = written(segments)
    live = [each for row in rows for each in row["blocks"] if each["state"] != INACTIVE]
    random.shuffle(live)
    events = [allocation(each["address"], each["size"], MAIN) for each in live]
    (order,) = allocation_orders([parse(snapshot(*rows, events=events), "")], 0)
    assert [each.address for each in order] == [each["address"] for each in live]
    assert positions(order) == [sum(each["size"] for each in live[:number]) for number in range(len(live))]


# ---- Which snapshots are of one process


def write_moments(folder: Path, programs: Mapping[str, Callable[[int], list[Row]]], steps: int = 3) -> Path:
    """One process for each program, whose name begins with its role."""
    for step in range(steps):
        for number, (role, program) in enumerate(programs.items()):
            place = folder / f"step-{8 + step}" / f"{role}-{number}.pickle"
            write(place, snapshot(*program(step), role=role.split(".")[0], pid=100 + number, step=8 + step))
    return folder


def test_the_process_that_leaks_comes_first(tmp_path: Path) -> None:
    programs = {"detokenizer": steady, "scheduler": held, "tokenizer": leaking}
    results = compare(write_moments(tmp_path, programs))
    assert [usage.process.role for usage in results.processes] == ["tokenizer", "scheduler", "detokenizer"]
    assert [leak.process.role for leak in results.leaks] == ["tokenizer"]
    assert results.moments == ("step 8", "step 9", "step 10")


def test_processes_of_one_role_are_told_apart_by_their_pids(tmp_path: Path) -> None:
    results = compare(write_moments(tmp_path, {"worker.1": steady, "worker.2": leaking}))
    assert [usage.process.pid for usage in results.processes] == [101, 100]
    assert [len(usage.moments) for usage in results.processes] == [3, 3]


def test_a_process_that_was_restarted_is_matched_by_role_and_rank(tmp_path: Path) -> None:
    for step in range(3):
        write(tmp_path / str(step) / "a.pickle", snapshot(*leaking(step), role="trainer", rank=2, pid=step, step=step))
    results = compare(tmp_path)
    assert [(usage.process.rank, usage.moments) for usage in results.processes] == [(2, (0, 1, 2))]
    assert len(results.leaks) == 1


@pytest.mark.parametrize("pids", [(100, 200), (7, 7)], ids=["machine", "container"])
def test_the_newest_run_of_a_folder_is_compared(tmp_path: Path, pids: tuple[int, int]) -> None:
    """The processes of a run end before those of the next one begin, whose first moment is the last one before."""
    for pid, start, first, program in ((pids[0], 1000, 1, leaking), (pids[1], 2000, 4, steady)):
        for number in range(4):
            step = first + number
            for role in ("engine", "trainer"):
                times = {"started_ns": start, "time_ns": start + step}
                own = {"role": role, "pid": pid + (role == "engine"), "step": step, **times}
                write(tmp_path / f"step-{step}" / f"{role}-{start}.pickle", snapshot(*program(number), **own))
    results = compare(tmp_path)
    assert {usage.process.pid for usage in results.processes} == {pids[1], pids[1] + 1}
    assert (results.moments, results.leaks) == (("step 4", "step 5", "step 6", "step 7"), ())
    note = f"{tmp_path} has several runs. Compared is the newest: 4 of 7 moments. To compare others, name their folders."
    assert results.notes == (note,)
    old = compare(*(tmp_path / f"step-{step}" for step in range(1, 4)))
    assert (len(old.leaks), old.notes) == (2, ())


def test_processes_that_took_one_snapshot_each_are_of_one_run(tmp_path: Path) -> None:
    for step in range(1, 4):
        own = {"role": "trainer", "pid": step, "step": step, "time_ns": step}
        write(tmp_path / f"step-{step}" / "a.pickle", snapshot(*leaking(step), **own))
    assert len(compare(tmp_path).leaks) == 1


def test_files_without_a_process_are_matched_by_name(tmp_path: Path) -> None:
    for step in range(3):
        write(tmp_path / f"step-{step}" / "rank0.pickle", snapshot(*steady()))
        write(tmp_path / f"step-{step}" / "rank1.pickle", snapshot(*leaking(step)))
    results = compare(tmp_path)
    assert [usage.process.file for usage in results.processes] == ["rank1", "rank0"]


def test_a_process_that_a_moment_lacks(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": leaking, "engine": steady}, steps=4)
    (folder / "step-9" / "trainer-0.pickle").unlink()
    results = compare(folder)
    assert results.processes[0].moments == (0, 2, 3)
    assert [note for note in results.notes if "trainer" in note and "step 9" in note]


def test_the_order_of_files_within_a_moment_does_not_matter(tmp_path: Path) -> None:
    folder = write_moments(tmp_path / "a", {"trainer": leaking, "engine": held})
    files = [sorted(step.iterdir()) for step in sorted(folder.iterdir(), key=lambda path: int(path.name[5:]))]
    by_moment = compare(*(file for moment in files for file in moment))
    reversed_files = compare(*(file for moment in files for file in reversed(moment)))
    by_process = compare(*(moment[number] for number in range(2) for moment in files))
    assert by_moment == reversed_files == by_process == compare(folder)


def test_folders_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": leaking})
    assert compare(folder).leaks[0].blocks == (1, 2, 3)


def test_the_folder_of_a_recorded_run_has_the_moments_in_snapshots(tmp_path: Path) -> None:
    folder = write_moments(tmp_path / "snapshots", {"trainer": leaking})
    assert compare(tmp_path) == compare(folder)


def test_files_that_are_being_written_are_left_out(tmp_path: Path) -> None:
    folder = write_moments(tmp_path, {"trainer": steady})
    (folder / "step-9" / ".trainer.pickle").write_bytes(b"half")
    shutil.copy(folder / "step-9" / "trainer-0.pickle", folder / ".x.pickle")
    assert len(compare(folder).moments) == 3


def test_inputs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no snapshot"):
        compare()
    with pytest.raises(InvalidArgumentError, match=f"{tmp_path} has .* name a folder of `run --record snapshots`"):
        compare(tmp_path)


def test_two_snapshots_of_one_process_and_moment(tmp_path: Path) -> None:
    content = snapshot(role="trainer", pid=1)
    moment = compare(parse(content, ""), parse(content, ""))
    assert len(moment.moments) == 2
