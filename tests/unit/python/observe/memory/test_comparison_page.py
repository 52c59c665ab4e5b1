"""Guards the page of a comparison: it stands alone, runs no text of a snapshot, stays small, and says what it has folded."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser
from pages import HOSTILE, Elements, assert_only_own_code_runs, assert_stands_alone, data_of, opened
from snapshots import (
    AWAITING_FREE,
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
)

from torch_memory_saver.observe.memory import Comparison, Snapshot, compare
from torch_memory_saver.observe.memory.comparison.drift import allocation_orders
from torch_memory_saver.observe.memory.comparison.html.pictures import OTHER, StackNumbers, bars, layers
from torch_memory_saver.observe.memory.snapshot_reader import parse

BASE = 1 << 40
MAIN: Call = ("/srv/engine/main.py", 10, "main")
BURST: Call = ("/srv/engine/batch.py", 5, "decode_batch")
LEAK: Call = ("/srv/engine/images.py", 88, "to_gpu")


def comparison(*segments: Row, leak: Call | None = None) -> Comparison:
    """A recording, with further segments in each moment, and with a further leak by the function `leak`."""
    moments = recorded()
    for step, content in enumerate(moments, start=1):
        content["segments"] += [*segments, *([segment(BASE, *[block(MIB, leak)] * step)] if leak else [])]
    return compare(*(parse(content, "") for content in moments))


def read(*segments: Row, events: list[Row] | None = None) -> Snapshot:
    return parse(snapshot(*segments, events=events or ()), "")


def numbered(snapshot: Snapshot) -> StackNumbers:
    return StackNumbers((), (block.stack for block in snapshot.live_blocks(0)))


def test_the_page_stands_alone() -> None:
    page = comparison().html()
    assert_stands_alone(page)
    assert_only_own_code_runs(page)


def test_text_of_a_snapshot_is_never_markup() -> None:
    plain, hostile = comparison(leak=("/srv/a.py", 1, "f")).html(), comparison(leak=(HOSTILE, 1, HOSTILE)).html()
    assert Elements(hostile).names == Elements(plain).names
    assert any(HOSTILE in text for text in data_of(hostile)["frames"])
    assert "<img src=x" in Elements(hostile).texts["pre"][0]


def test_text_like_a_placeholder_stays() -> None:
    page = comparison(leak=("/srv/{{STYLE}}.py", 1, "{{DATA}}")).html()
    assert any("{{STYLE}}.py:1 {{DATA}}" in text for text in data_of(page)["frames"])


def test_the_findings_are_in_the_data() -> None:
    compared = comparison()
    data = data_of(compared.html())
    (leak,) = data["leaks"]
    assert data["stacks"][leak["stack"]]["title"] == "record_snapshots.py:46 numbers < :82 encode_images"
    assert data["stacks"][leak["stack"]]["leak"] is True
    assert [stack["leak"] for stack in data["stacks"]].count(True) == 1
    (process,) = compared.processes
    assert [view["where"] for view in data["views"]] == [f"trainer, pid {process.process.pid}, device 0"]
    assert [moment["moment"] for moment in data["views"][0]["snapshots"]] == [0, 1, 2, 3]
    (found,) = data["fragmentation"]
    assert found["cached"] == compared.fragmentation[0].usage.cached[-1]
    warmed = [[data["frames"][frame] for frame in data["stacks"][row["stack"]]["frames"]] for row in data["warmUps"]]
    assert [" torch/optim/adam.py:178 _init_group", "*/program/record_snapshots.py:95 train"] in [
        [frames[0], next(frame for frame in frames if frame.startswith("*"))] for frames in warmed
    ]


def test_the_bar_of_a_segment() -> None:
    row = segment(
        BASE, block(MIB // 2, MAIN), block(MIB // 4, BURST, state=AWAITING_FREE), free(5 * MIB // 4), is_expandable=False
    )
    compared = read(row)
    numbers = numbered(compared)
    (bar,) = bars(compared.segments, numbers)["rows"]
    stacks = [numbers[each.stack] for each in compared.live_blocks(0)]
    assert bar["blocks"] == [[0, MIB // 2, stacks[0], 0, 1], [MIB // 2, MIB // 4, stacks[1], 1, 1]]
    assert (bar["bytes"], bar["live"], bar["held"], bar["expandable"]) == (2 * MIB, 3 * MIB // 4, 0, False)


def test_segments_that_are_held_come_first() -> None:
    compared = read(
        segment(BASE, block(64 * MIB, MAIN)),
        segment(BASE + 128 * MIB, block(MIB, MAIN), free(MIB)),
        segment(BASE + 256 * MIB, block(2 * MIB, BURST), free(18 * MIB)),
    )
    rows = bars(compared.segments, numbered(compared))["rows"]
    assert [(row["bytes"], row["held"]) for row in rows] == [(20 * MIB, 18 * MIB), (64 * MIB, 0), (2 * MIB, 0)]


def test_small_neighbours_are_one_block() -> None:
    compared = read(segment(BASE, *[block(KIB, MAIN)] * 3, *[block(KIB, BURST)] * 3, free(2 * MIB - 6 * KIB)))
    (row,) = bars(compared.segments, numbered(compared))["rows"]
    assert row["blocks"] == [[0, 6 * KIB, OTHER, 0, 6]]


def test_segments_without_a_bar_are_counted() -> None:
    compared = read(*(segment(BASE + number * 16 * MIB, block(12 * MIB, MAIN)) for number in range(130)))
    found = bars(compared.segments, numbered(compared))
    assert len(found["rows"]) + found["folded"][0] == 130
    assert found["folded"][1:] == [found["folded"][0] * 12 * MIB] * 2


def test_the_layers_of_the_timeline() -> None:
    early, kept, short, late = (BASE + number * 64 * MIB for number in range(4))
    events = [
        allocation(short, 3 * MIB, BURST),
        allocation(late, 14 * MIB, LEAK),
        *deletion(early, 8 * MIB),
        *deletion(short, 3 * MIB),
    ]
    compared = read(segment(kept, block(12 * MIB)), segment(late, block(14 * MIB, LEAK)), events=events)
    picture = layers(compared.events[0], allocation_orders([compared], 0)[0], numbered(compared))
    # From the bottom up: what lay there before, then by event.
    assert [row[:3] for row in picture["allocations"]] == [
        [0, 6, 12 * MIB],
        [0, 3, 8 * MIB],
        [0, 5, 3 * MIB],
        [1, 6, 14 * MIB],
    ]
    assert (picture["events"], picture["folded"], picture["layers"]) == (6, 0, [])


def test_small_allocations_are_folded_by_call_stack() -> None:
    rows, events = [], []
    for number in range(1500):
        address, size, call = BASE + number * 2 * MIB, (number + 1) * KIB, MAIN if number < 100 else BURST
        rows.append(segment(address, block(size, call)))
        events.append(allocation(address, size, call))
    compared = read(*rows, events=events)
    numbers = numbered(compared)
    picture = layers(compared.events[0], allocation_orders([compared], 0)[0], numbers)
    assert len(picture["allocations"]) + picture["folded"] == 1500
    drawn = sum(row[2] for row in picture["allocations"])
    folded = {row["stack"]: row["values"][-1] for row in picture["layers"]}
    assert drawn + sum(folded.values()) == sum(each.bytes for each in compared.live_blocks(0))
    assert set(folded) == {numbers[each.stack] for each in compared.live_blocks(0)}
    assert all(values == sorted(values) for values in (row["values"] for row in picture["layers"]))


def test_what_is_folded_is_said_and_the_page_stays_small() -> None:
    page = comparison(segment(BASE, *(block(KIB, ("/srv/many.py", line, "f"), MAIN) for line in range(900)))).html()
    data = data_of(page)
    assert any("call stacks are named in the pictures" in note for note in data["notes"])
    assert len(data["stacks"]) < 700
    assert len(page) < 600 * KIB


@needs_browser
@pytest.mark.parametrize("hostile", [False, True])
def test_in_a_browser(tmp_path: Path, hostile: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(comparison(leak=(HOSTILE, 1, HOSTILE) if hostile else None).html(), encoding="utf-8")
    text = opened(page)
    elements = Elements(text)
    assert elements.texts["title"] == ["Memory snapshots compared"]
    assert "img" not in elements.names
    assert "record_snapshots.py:46 numbers &lt; :82 encode_images</button>" in text
    assert elements.names.count("canvas") == 2
    assert (HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in text) == hostile
