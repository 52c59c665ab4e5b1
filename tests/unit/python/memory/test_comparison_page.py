"""Guards the page of a comparison: it stands alone, runs no text of a snapshot, stays small, and says what it has folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from caching_allocator import KIB, MIB, CachingAllocator
from pages import HOSTILE, Elements, assert_only_own_code_runs, assert_stands_alone, data_of, needs_browser, opened
from planted import BURST, LEAK, MAIN, Program

from torch_memory_saver.memory import Comparison, Snapshot, compare
from torch_memory_saver.memory.comparison.drift import allocation_orders
from torch_memory_saver.memory.comparison.html.pictures import OTHER, StackNumbers, bars, layers
from torch_memory_saver.memory.loading import parse


def comparison(*calls: Any, program: Program | None = None) -> Comparison:
    program, snapshots = program or Program(leak=True, adam=True, fragmentation=True, offloaded=True), []
    for _ in range(3):
        program.step()
        if calls:
            program.allocator.alloc(MIB, *calls)
        snapshots.append(parse(program.allocator.snapshot(role="engine", pid=7), ""))
    return compare(*snapshots)


def numbered(snapshot: Snapshot) -> StackNumbers:
    return StackNumbers((), (block.stack for block in snapshot.live_blocks(0)))


def test_the_page_stands_alone() -> None:
    page = comparison().html()
    assert_stands_alone(page)
    assert_only_own_code_runs(page)


def test_text_of_a_snapshot_is_never_markup() -> None:
    plain, hostile = comparison(("/srv/a.py", 1, "f")).html(), comparison((HOSTILE, 1, HOSTILE)).html()
    assert Elements(hostile).names == Elements(plain).names
    assert any(HOSTILE in text for text in data_of(hostile)["frames"])
    assert "<img src=x" in Elements(hostile).texts["pre"][0]


def test_text_like_a_placeholder_stays() -> None:
    page = comparison(("/srv/{{STYLE}}.py", 1, "{{DATA}}")).html()
    assert any("{{STYLE}}.py:1 {{DATA}}" in text for text in data_of(page)["frames"])


def test_the_findings_are_in_the_data() -> None:
    compared = comparison()
    data = data_of(compared.html())
    (leak,) = data["leaks"]
    assert data["stacks"][leak["stack"]]["title"] == "images.py:88 to_gpu < main.py:10 main"
    assert data["stacks"][leak["stack"]]["leak"] is True
    assert [stack["leak"] for stack in data["stacks"]].count(True) == 1
    assert [view["where"] for view in data["views"]] == ["engine, pid 7, device 0"]
    assert [snapshot["moment"] for snapshot in data["views"][0]["snapshots"]] == [0, 1, 2]
    frames = [data["frames"][frame] for frame in data["stacks"][data["warmUps"][0]["stack"]]["frames"]]
    (found,) = data["fragmentation"]
    assert found["cached"] == compared.fragmentation[0].usage.cached[-1]
    assert frames[:2] == [" torch/optim/adam.py:182 _init_group", "*/srv/trainer/step.py:33 optimizer_step"]


def test_the_bar_of_a_segment() -> None:
    allocator = CachingAllocator()
    first, waiting = allocator.alloc(MIB // 2, MAIN), allocator.alloc(MIB // 4, BURST)
    allocator.free(waiting, awaiting=True)
    snapshot = parse(allocator.snapshot(), "")
    numbers = numbered(snapshot)
    (row,) = bars(snapshot.segments, numbers)["rows"]
    stacks = [numbers[block.stack] for block in snapshot.live_blocks(0)]
    assert first == snapshot.segments[0].address
    assert row["blocks"] == [[0, MIB // 2, stacks[0], 0, 1], [MIB // 2, MIB // 4, stacks[1], 1, 1]]
    assert (row["bytes"], row["live"], row["held"], row["expandable"]) == (2 * MIB, 3 * MIB // 4, 0, False)


def test_segments_that_are_held_come_first() -> None:
    allocator = CachingAllocator()
    allocator.alloc(64 * MIB, MAIN)
    allocator.alloc(MIB, MAIN)
    allocator.alloc(2 * MIB, BURST)
    snapshot = parse(allocator.snapshot(), "")
    rows = bars(snapshot.segments, numbered(snapshot))["rows"]
    assert [(row["bytes"], row["held"]) for row in rows] == [(20 * MIB, 18 * MIB), (64 * MIB, 0), (2 * MIB, 0)]


def test_small_neighbours_are_one_block() -> None:
    allocator = CachingAllocator()
    for number in range(6):
        allocator.alloc(KIB, MAIN if number < 3 else BURST)
    snapshot = parse(allocator.snapshot(), "")
    (row,) = bars(snapshot.segments, numbered(snapshot))["rows"]
    assert row["blocks"] == [[0, 6 * KIB, OTHER, 0, 6]]


def test_segments_without_a_bar_are_counted() -> None:
    allocator = CachingAllocator()
    for _ in range(130):
        allocator.alloc(12 * MIB, MAIN)
    snapshot = parse(allocator.snapshot(), "")
    found = bars(snapshot.segments, numbered(snapshot))
    assert len(found["rows"]) + found["folded"][0] == 130
    assert found["folded"][1:] == [found["folded"][0] * 12 * MIB] * 2


def test_the_layers_of_the_timeline() -> None:
    allocator = CachingAllocator()
    allocator.recording = False
    early = allocator.alloc(8 * MIB, MAIN)
    allocator.alloc(12 * MIB, MAIN)
    allocator.recording = True
    short = allocator.alloc(3 * MIB, BURST)
    allocator.alloc(14 * MIB, LEAK)
    allocator.free(early)
    allocator.free(short)
    snapshot = parse(allocator.snapshot(), "")
    picture = layers(snapshot.events[0], allocation_orders([snapshot], 0)[0], numbered(snapshot))
    actions = [event.action for event in snapshot.events[0]]
    assert actions == ["segment_alloc", "alloc", "alloc", *["free_requested", "free_completed"] * 2]
    # From the bottom up: what lay there before, then by event.
    assert [row[:3] for row in picture["allocations"]] == [
        [0, 7, 12 * MIB],
        [0, 4, 8 * MIB],
        [1, 6, 3 * MIB],
        [2, 7, 14 * MIB],
    ]
    assert (picture["events"], picture["folded"], picture["layers"]) == (7, 0, [])


def test_small_allocations_are_folded_by_call_stack() -> None:
    allocator = CachingAllocator()
    for number in range(1500):
        allocator.alloc((number + 1) * KIB, MAIN if number < 100 else BURST)
    snapshot = parse(allocator.snapshot(), "")
    numbers = numbered(snapshot)
    picture = layers(snapshot.events[0], allocation_orders([snapshot], 0)[0], numbers)
    assert len(picture["allocations"]) + picture["folded"] == 1500
    drawn = sum(row[2] for row in picture["allocations"])
    folded = {row["stack"]: row["values"][-1] for row in picture["layers"]}
    assert drawn + sum(folded.values()) == allocator.allocated
    assert set(folded) == {numbers[block.stack] for block in snapshot.live_blocks(0)}
    assert all(values == sorted(values) for values in (row["values"] for row in picture["layers"]))


def test_what_is_folded_is_said_and_the_page_stays_small() -> None:
    program = Program()
    for line in range(900):
        program.allocator.alloc(KIB, ("/srv/many.py", line, "f"), MAIN)
    page = comparison(program=program).html()
    data = data_of(page)
    assert any("call stacks are named in the pictures" in note for note in data["notes"])
    assert len(data["stacks"]) < 700
    assert len(page) < 600 * KIB


@needs_browser
@pytest.mark.parametrize("hostile", [False, True])
def test_in_a_browser(tmp_path: Path, hostile: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(comparison(*[(HOSTILE, 1, HOSTILE)] * hostile).html(), encoding="utf-8")
    text = opened(page)
    elements = Elements(text)
    assert elements.texts["title"] == ["Memory snapshots compared"]
    assert "img" not in elements.names
    assert "images.py:88 to_gpu &lt; main.py:10 main</button>" in text
    assert elements.names.count("canvas") == 2
    assert (HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in text) == hostile
