"""Guards the comparison of programs that pause several times in a step, at regular and at irregular times: growth that goes
on is a leak whatever its rhythm, growth that has stopped is a warm-up, and memory that each step frees is neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pages import data_of
from snapshots import MIB, Call, Row, block, segment, snapshot, write

from torch_memory_saver._cli.main import main
from torch_memory_saver.observe.memory import Comparison, compare
from torch_memory_saver.observe.memory.comparison.growth import GrowthKind, classify
from torch_memory_saver.observe.memory.snapshot_reader import parse

BASE = 1 << 40
LOOP: Call = ("/srv/train.py", 8, "loop")
STEP: Call = ("/srv/train.py", 30, "forward")

#: The tags of the pauses of a step, given the number of the step.
Pauses = Callable[[int], Sequence[str]]
#: The blocks that the program holds after a step, given the number of the step.
Held = Callable[[int], int]

PAUSES: dict[str, Pauses] = {
    "one": lambda step: ["kv_cache"],
    "two": lambda step: ["kv_cache", "weights"],
    "five": lambda step: ["kv_cache", "draft", "weights", "gradients", "optimizer"],
    "the same tag twice": lambda step: ["weights", "kv_cache", "weights"],
    "five of one tag": lambda step: ["weights"] * 5,
    "an evaluation each fifth step": lambda step: ["kv_cache", "weights", *(["kv_cache"] if step % 5 == 4 else [])],
    "another tag each fifth step": lambda step: ["kv_cache", "weights", *(["evaluation"] if step % 5 == 4 else [])],
    "a checkpoint at times": lambda step: [*(["optimizer"] if step in (1, 2, 7) else []), "kv_cache", "weights"],
}
LEAKS: dict[str, Held] = {
    "each step": lambda step: step + 1,
    "each second step": lambda step: step // 2 + 1,
    "each third step": lambda step: step // 3 + 1,
    "two steps of three": lambda step: step + 1 - (step + 1) // 3,
}
WARM_UPS: dict[str, Held] = {
    "a list of four": lambda step: min(step + 1, 4),
    "each second step until the sixth": lambda step: min(step // 2 + 1, 3),
    "once at the end": lambda step: int(step >= 8),
    "once in the middle": lambda step: int(step >= 5),
}
every_program = pytest.mark.parametrize("pauses", PAUSES.values(), ids=PAUSES)


def recorded(pauses: Pauses, held: Held, steps: int = 10, in_flight: Held = lambda step: 0) -> list[Row]:
    """Return the snapshots before the pauses of a program. Each step frees what is in flight before its second pause."""
    rows: list[Row] = []
    for step in range(steps):
        for number, tag in enumerate(pauses(step)):
            blocks = [block(MIB, LOOP)] * held(step - 1) if step else []
            if number == 0:
                blocks += [block(2 * MIB, STEP), *[block(MIB, LOOP)] * in_flight(step)]
            content = segment(BASE, block(16 * MIB, ("/srv/model.py", 1, "load")), *blocks)
            rows.append(snapshot(content, role="trainer", pausing=[tag], step=len(rows) + 1))
    return rows


def compared(rows: Sequence[Row]) -> Comparison:
    return compare(*(parse(row, "") for row in rows))


def lines(results: Comparison, kind: GrowthKind) -> list[Call]:
    return [
        (frame.filename, frame.line, frame.name) for row in results.growths if row.kind is kind for frame in row.stack.frames
    ]


@every_program
@pytest.mark.parametrize("held", LEAKS.values(), ids=LEAKS)
def test_growth_that_goes_on_is_a_leak_whatever_its_rhythm(pauses: Pauses, held: Held) -> None:
    for steps in (9, 10, 11, 12, 13):
        results = compared(recorded(pauses, held, steps))
        assert lines(results, GrowthKind.LEAK) == [LOOP], steps


@every_program
@pytest.mark.parametrize("held", WARM_UPS.values(), ids=WARM_UPS)
def test_growth_that_stops_or_comes_once_is_a_warm_up(pauses: Pauses, held: Held) -> None:
    results = compared(recorded(pauses, held, 12))
    assert results.leaks == ()
    assert LOOP in lines(results, GrowthKind.WARM_UP)


@every_program
def test_memory_that_each_step_frees_is_neither(pauses: Pauses) -> None:
    results = compared(recorded(pauses, lambda step: 0, 12, in_flight=lambda step: step % 4))
    assert (results.leaks, results.warm_ups, results.fragmentation, results.drifts) == ((), (), (), ())


@pytest.mark.parametrize("name", ["two", "five", "the same tag twice", "another tag each fifth step"])
def test_a_line_that_leaks_and_also_frees_is_a_leak(name: str) -> None:
    """What is in flight at the first pause of a step is freed before the second, and varies."""
    results = compared(recorded(PAUSES[name], LEAKS["each step"], in_flight=lambda step: 3 - step % 3))
    assert lines(results, GrowthKind.LEAK) == [LOOP]


def test_a_pause_before_the_first_step_breaks_the_period_only() -> None:
    """The two pauses of the weights are one point then, so the pause between them is compared."""
    pauses = PAUSES["the same tag twice"]
    rows = recorded(lambda step: ["all", *pauses(step)] if step == 0 else pauses(step), LEAKS["each step"])
    results = compared(rows)
    assert lines(results, GrowthKind.LEAK) == [LOOP]
    assert results.notes[0].endswith("Compared are 10 of 31, those before a pause of kv_cache.")


def test_one_point_of_a_step_is_compared_and_the_note_says_which() -> None:
    results = compared(recorded(PAUSES["two"], LEAKS["each step"], 5))
    assert results.moments == ("pause 2", "pause 4", "pause 6", "pause 8", "pause 10")
    (usage,) = results.processes
    assert usage.moments == (0, 1, 2, 3, 4)
    assert usage.allocated == tuple((16 + number) * MIB for number in range(5))
    assert results.notes == (
        "trainer, pid 1 has several snapshots in each step. Compared are 5 of 10, those before a pause of weights.",
    )
    (leak,) = results.leaks
    assert leak.intervals == (MIB,) * 4


def test_each_process_has_its_own_steps() -> None:
    """An engine pauses twice in a step, its trainer once, beside the first pause of the engine."""
    engine = recorded(PAUSES["two"], LEAKS["each step"], 4)
    trainer = recorded(PAUSES["one"], lambda step: 0, 4)
    for row in engine:
        row["torch_memory_saver"] |= {"role": "engine", "pid": 2}
    for number, row in enumerate(trainer):
        row["torch_memory_saver"]["step"] = 2 * number + 1
    results = compared(sorted([*engine, *trainer], key=lambda row: int(row["torch_memory_saver"]["step"])))
    assert {usage.process.role: len(usage.allocated) for usage in results.processes} == {"engine": 4, "trainer": 4}
    assert [leak.process.role for leak in results.leaks] == ["engine"]
    assert [note.partition(",")[0] for note in results.notes] == ["engine"]


@pytest.mark.parametrize(
    "tags",
    [
        ["load"] * 4 + ["step"] * 4,  # neither occurs throughout
        [f"layer.{number}" for number in range(8)],
        ["kv_cache", "weights"] * 2,  # too few steps
    ],
)
def test_without_a_pattern_all_snapshots_are_compared(tags: list[str]) -> None:
    results = compared(recorded(lambda step: [tags[step]], lambda step: step + 1, len(tags)))
    assert len(results.moments) == len(tags)
    assert lines(results, GrowthKind.LEAK) == [LOOP]
    assert results.notes == ()


def test_snapshots_that_do_not_say_before_which_pause_they_were_taken() -> None:
    rows = recorded(PAUSES["two"], LEAKS["each second step"])
    for row in rows:
        del row["torch_memory_saver"]["pausing"]
    results = compared(rows)
    assert len(results.moments) == 20
    assert lines(results, GrowthKind.LEAK) == [LOOP]


def test_names_that_the_program_gives_have_a_pattern_as_well() -> None:
    rows = recorded(PAUSES["one"], LEAKS["each step"], 8)
    for number, row in enumerate(rows):
        del row["torch_memory_saver"]["pausing"]
        row["torch_memory_saver"]["tag"] = "before" if number % 2 == 0 else "after"
    assert compared(rows).notes == (
        'trainer, pid 1 has several snapshots in each step. Compared are 4 of 8, those with the tag "before".',
    )


def test_a_pause_of_everything_is_a_point() -> None:
    rows = recorded(PAUSES["two"], LEAKS["each step"], 4)
    for row in rows[1::2]:
        row["torch_memory_saver"]["pausing"] = []
    (note,) = compared(rows).notes
    assert note.endswith("those before a pause of everything.")


def written(rows: Sequence[Row], folder: Path) -> Iterator[Path]:
    for number, row in enumerate(rows, 1):
        yield write(folder / f"step-{number:06d}" / "trainer.pickle", row)


@every_program
@pytest.mark.parametrize("held", [*LEAKS.values(), *WARM_UPS.values(), lambda step: 0])
def test_the_command_fails_exactly_if_the_page_shows_a_leak(pauses: Pauses, held: Held, tmp_path: Path) -> None:
    assert len(list(written(recorded(pauses, held), tmp_path))) >= 10
    page = tmp_path / "leak.html"
    status = main(["compare", str(tmp_path), "--fail-on-leak", "-o", str(page)])
    leaks = data_of(page.read_text(encoding="utf-8"))["leaks"]
    assert (status, len(leaks)) == ((1, 1) if held in LEAKS.values() else (0, 0))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((0, 1, 2), GrowthKind.LEAK),
        ((0, 1, 1), GrowthKind.WARM_UP),
        ((0, 0, 1), GrowthKind.WARM_UP),
        ((0, 1, 2, 2), GrowthKind.WARM_UP),
        ((0, 1, 1, 2, 2), GrowthKind.LEAK),
        ((0, 1, 2, 3, 3), GrowthKind.WARM_UP),
        ((0, 1, 2, 3, 4, 4), GrowthKind.LEAK),
        ((0, 1, 2, 2, 2, 2), GrowthKind.WARM_UP),
        ((0, 1, 1, 1, 2, 2, 2), GrowthKind.LEAK),
        ((0, 1, 1, 1, 2, 2, 2, 2), GrowthKind.WARM_UP),
        ((0, 1, 2, 3, 4, 5, 6, 7, 8, 7), GrowthKind.VARYING),
    ],
)
def test_when_growth_has_stopped(values: tuple[int, ...], kind: GrowthKind) -> None:
    assert classify(values) is kind
