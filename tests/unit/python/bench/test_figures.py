"""Guards the arithmetic of the benchmarks, and its presentation. Nothing here is measured."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from torch_memory_saver._bench import cases, figures, handle_cases, memory, plot, setting, table
from torch_memory_saver._bench.figures import AT_LEAST, AT_MOST, GAIN, MEMORY, PEER, Row, Samples, Target
from torch_memory_saver.errors import InvalidArgumentError

MIB = 1 << 20
GIB = 1 << 30
MACHINE = {"device": "A GPU", "processors": 2, "driver": "1.2", "torch": None, "date": "2026-01-02", "simulated": False}


def row(case: str = "retained", shape: str = "2 x 4 MiB", operation: str = "pause", **given: Any) -> Row:
    given = {"bytes": 8 * MIB, "ours": Samples.of([2.0]), **given}
    return Row(case, shape, operation, **given)


def test_samples() -> None:
    odd, even = Samples.of([3.0, 1.0, 2.0]), Samples.of([4.0, 1.0, 2.0, 3.0])
    assert (odd.median, odd.spread) == (2.0, (1.0, 3.0))
    assert even.median == 2.5
    assert odd.as_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}


@pytest.mark.parametrize("values", [[], [-1.0], [1.0, -0.5]])
def test_samples_that_are_none(values: list[float]) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        Samples.of(values)


@pytest.mark.parametrize(
    ("kind", "value", "ours", "limit", "ratio", "met"),
    [
        (AT_LEAST, 0.97, 2.0, 1.96, 0.98, True),
        (AT_LEAST, 0.97, 2.0, 1.9, 0.95, False),
        (AT_MOST, 1.15, 2.2, 2.0, 1.1, True),
        (AT_MOST, 1.15, 2.4, 2.0, 1.2, False),
        (GAIN, 2.5, 2.0, 6.0, 3.0, True),
        (GAIN, 2.5, 2.0, 4.0, 2.0, False),
        (MEMORY, 256.0, 1100, 1000, 100, True),
        (MEMORY, 256.0, 1300, 1000, 300, False),
        (AT_LEAST, None, 2.0, 1.0, 0.5, None),
    ],
)
def test_targets(kind: str, value: float | None, ours: float, limit: float, ratio: float, met: bool | None) -> None:
    measured = row(ours=Samples.of([ours]), limit=Samples.of([limit]), target=Target(kind, value))
    assert measured.ratio == pytest.approx(ratio)
    assert measured.met is met


def test_the_ratio_is_the_median_of_all_pairs() -> None:
    measured = row(ours=Samples.of([1.0, 2.0, 30.0]), limit=Samples.of([1.0, 1.5, 1.6]), peer=Samples.of([3.0, 3.0, 9.0]))
    assert measured.ratio == pytest.approx(0.75)  # of 1, 1.5, 1.6, their halves and thirtieths
    assert measured.peer_ratio == pytest.approx(1 / 3)
    assert measured.speed(measured.ours) == 4 * MIB


def test_a_machine_with_two_speeds_shows_no_false_difference() -> None:
    sides = Samples.of([2.0, 2.02, 1.98, 2.01, 1.0, 1.01, 0.99]), Samples.of([1.0, 1.01, 0.99, 1.0, 2.0, 2.02, 1.98])
    assert sides[0].median / sides[1].median > 1.9, "what the ratio of the medians would say"
    assert Target(AT_MOST, 1.15).ratio(*sides) == pytest.approx(1.0, abs=0.03)
    a_tenth_more = Samples.of(value * 1.1 for value in sides[0].values)
    assert Target(AT_MOST, 1.15).ratio(a_tenth_more, sides[1]) == pytest.approx(1.1, abs=0.04)


def test_without_a_limit_or_a_moving_clock_nothing_is_claimed() -> None:
    assert row(target=Target(AT_LEAST, 0.9)).met is None
    still = row(ours=Samples.of([0.0]), limit=Samples.of([1.0]))
    assert still.ratio == math.inf
    assert still.speed(still.ours) is None
    assert row(bytes=0).speed(Samples.of([1.0])) is None
    with pytest.raises(ValueError, match="the kind of a target must be one of"):
        Target("nonsense")


def test_rows_survive_json() -> None:
    measured = row(
        limit=Samples.of([1.0]), limit_name="it", target=Target(GAIN, 2.0), peer=Samples.of([4.0]), notes="a note"
    )
    text = json.dumps(measured.as_json())
    assert figures.row_from_json(json.loads(text)) == measured
    data = json.loads(text)
    assert (data["unit"], data["ratio"], data["met"], data["peer_ratio"]) == ("seconds", 0.5, False, 0.25)
    assert data["bytes_per_second"] == 4 * MIB
    assert row(target=Target(MEMORY, 1)).as_json()["unit"] == "bytes"


def test_processes_are_merged() -> None:
    ours = [
        row(ours=Samples.of([value]), limit=Samples.of([1.0]), limit_name="it", target=Target(AT_LEAST, 0.6))
        for value in (2.0, 4.0, 3.0)
    ]
    peers = [row(ours=None, peer=Samples.of([value])) for value in (9.0, 8.0)]
    for order in ([*ours, *peers], [peers[0], *ours, peers[1]]):
        (merged,) = figures.merge(order)
        assert merged.ours == Samples((2.0, 4.0, 3.0))
        assert merged.limit == Samples((1.0, 1.0, 1.0))
        assert merged.peer == Samples((9.0, 8.0))
        assert (merged.limit_name, merged.target) == ("it", Target(AT_LEAST, 0.6))
    assert [merged.operation for merged in figures.merge([row(), row(operation="resume"), row()])] == ["pause", "resume"]


def test_many_small_handles_are_held_against_few_large_ones() -> None:
    large, small = str(cases.LARGE), str(cases.SMALL)
    rows = [
        row(shape=large, bytes=1000, ours=Samples.of([1.0, 1.2])),
        row(shape=small, bytes=500, ours=Samples.of([0.5, 0.6]), peer=Samples.of([7.0])),
        row(case="mmap", shape=small, bytes=500),
    ]
    *before, parity = cases.with_comparisons(rows, 1.0)
    assert before == rows
    assert (parity.case, parity.shape, parity.operation) == ("retained", small, "pause parity")
    assert parity.limit == Samples((0.5, 0.6))
    assert (parity.ratio, parity.met, parity.peer) == (1.0, True, None)


@pytest.mark.parametrize(
    ("case", "operation", "at_least"),
    [
        *(("pooled", "pause", 0.96), ("retained", "pause", 0.96), ("pooled", "resume", 0.95), ("retained", "resume", 0.95)),
        *(
            ("first", "pause", 0.95),
            ("release", "resume", 0.95),
            ("pooled", "resume at once", None),
            ("mmap", "pause", None),
        ),
    ],
)
def test_parity_is_asked_by_case_and_operation(case: str, operation: str, at_least: float | None) -> None:
    notes = "from the second cycle on"
    rows = [row(case, str(shape), operation, notes=notes) for shape in (cases.LARGE, cases.SMALL)]
    added = cases.with_comparisons(rows, 1.0)[2:]
    assert [each.target for each in added] == [Target(AT_LEAST, at_least)] * (at_least is not None)
    assert all(each.limit_name == f"{cases.LARGE}, byte for byte, {notes}" for each in added)


def test_the_c_package_is_compared_where_a_case_asks() -> None:
    timed = {"ours": Samples.of([2.0, 4.0]), "limit": Samples.of([1.0]), "limit_name": "it", "peer": Samples.of([12.0])}
    rows = [
        row("cycles", operation="pause", notes="a note", target=Target(AT_MOST, 1.5), **timed),
        row("cycles", operation="first pause", **timed),
        row("cycles", operation="resume", **{**timed, "peer": None}),
        row("model", operation="resume", **timed),
        row("dropped", operation="pause", **timed),
    ]
    *before, cycles, model = cases.with_comparisons(rows, 1.0)
    assert before == rows
    assert (cycles.case, cycles.shape, cycles.operation) == ("cycles", "2 x 4 MiB", f"pause{PEER}")
    assert (cycles.limit, cycles.limit_name, cycles.peer, cycles.notes) == (timed["peer"], "the C++ package", None, "")
    assert (cycles.ratio, cycles.target, cycles.met) == (4.5, Target(GAIN, 5.0), False)
    assert (model.operation, model.target, model.met) == (f"resume{PEER}", Target(GAIN, 3.0), True)
    assert figures.row_from_json(json.loads(json.dumps(cycles.as_json()))) == cycles
    text = table.terminal([cycles, rows[0]], [], MACHINE, "9.9")
    assert "  limit of C++: the C++ package" in text.splitlines()


def test_the_tensors_of_a_7b_model() -> None:
    whole = handle_cases.Transformer()
    sizes = whole.tensor_bytes()
    assert sum(sizes) == 2 * 7_615_616_512, "Qwen2.5-7B's parameters of two bytes"
    assert len(sizes) == 28 * 12 + 3
    assert whole.scaled(28, 1.0) == whole
    for layers, part in ((2, 1 / 36), (28, 0.25), (2, 0.5)):
        scaled = whole.scaled(layers, part).tensor_bytes()
        assert len(scaled) == layers * 12 + 3
        assert sum(scaled) == pytest.approx(sum(sizes) * part * layers / 28, rel=0.02)


def test_shapes_shrink() -> None:
    large, small = cases.LARGE, cases.SMALL
    assert str(large) == "32 x 512 MiB"
    assert large.scaled(1) == large
    assert large.scaled(0.25) == setting.Shape(8, 512 * MIB)
    assert setting.Shape(1, 32 * GIB).scaled(0.5) == setting.Shape(1, 16 * GIB)
    assert str(setting.Shape(500, 0).scaled(0.1)) == "once"
    smallest = setting.SMALLEST_SCALE
    assert large.scaled(smallest) != small.scaled(smallest)
    for case in cases.CASES:
        for shape in case.shapes:
            scaled = shape.scaled(smallest)
            assert scaled.bytes <= shape.bytes
            assert scaled.bytes <= 256 * MIB, "it is for tests"


def test_sizes_of_live_and_dead_blocks() -> None:
    pairs = memory.live_and_dead_sizes(GIB, 0.3, MIB, 8 * MIB, 1)
    live, dead = (sum(sizes) for sizes in zip(*pairs, strict=True))
    assert live / (live + dead) == pytest.approx(0.3, abs=0.001)
    assert GIB <= live + dead < GIB + 16 * MIB
    assert all(MIB <= size <= 8 * MIB and size % 512 == 0 for pair in pairs for size in pair)
    assert pairs == memory.live_and_dead_sizes(GIB, 0.3, MIB, 8 * MIB, 1)


def wide_rows() -> list[Row]:
    """With the longest possible texts and numbers."""
    seconds, peer = Samples.of([5.4321, 5.3, 5.5]), Samples.of([54.321])
    rows = [
        row(
            case.name,
            str(shape),
            operation,
            bytes=int(1e9),
            ours=seconds,
            limit=seconds,
            limit_name="a limit",
            peer=peer,
            target=Target(kind, value),
        )
        for case in cases.CASES
        if case.name not in ("host-memory", "allocate", "region", "import")
        for shape in case.shapes
        for operation, kind, value in (
            ("pause", AT_LEAST, 0.97),
            ("resume" if case.name != "wake-up" else "resume kv_cache", AT_MOST, 1.15),
            ("resume", GAIN, 2.5),
        )
    ]
    small = row(
        "region",
        "once",
        "GPU mostly in use",
        ours=Samples.of([1e-6, 2e-6]),
        limit=Samples.of([1e-5]),
        target=Target(AT_MOST, 1.0),
        bytes=0,
        peer=Samples.of([3e-5]),
    )
    held = Samples.of([16384 * MIB, 16484 * MIB])
    return [
        *rows,
        small,
        row(
            "host-memory",
            "one",
            "pinned: after",
            ours=held,
            limit=held,
            peer=held,
            target=Target(MEMORY, 256 * MIB),
            bytes=0,
        ),
    ]


def test_the_table_fits_a_terminal() -> None:
    left_out = [{"case": "live", "shape": "1 x 16 GiB", "side": "C++", "reason": "it does not " * 20}]
    text = table.terminal(cases.with_comparisons(wide_rows(), 1.0), left_out, MACHINE, "0.0.9.post1")
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0] == "A GPU, 2 CPUs, driver 1.2, without PyTorch, 2026-01-02"
    assert "limit of parity: 32 x 512 MiB, byte for byte" in text
    assert "resume parity" in text
    assert f"resume{PEER}" in text
    assert "C++: torch_memory_saver 0.0.9.post1" in text
    assert "simulated" not in text
    assert "a ratio is the median over all pairs" in text
    without = table.terminal([row()], [], {**MACHINE, "simulated": True}, None)
    assert "times mean nothing" in without
    assert "a ratio is" not in without


def test_the_text_of_the_table() -> None:
    missed = row(ours=Samples.of([0.2, 0.1, 0.3]), limit=Samples.of([0.1]), limit_name="it", target=Target(AT_LEAST, 0.97))
    lines = table.terminal([missed, row(operation="resume")], [], MACHINE, None).splitlines()
    assert "  limit: it" in lines
    assert next(line for line in lines if line.startswith("  pause")).split() == [
        *("pause", "200", "100", "-", "300", "0.0", "100", "50.0%", ">=", "97%", "NO"),
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("  resume")).split()[:5] == ["resume", "2000", "2000", "-", "2000"]


def test_markdown() -> None:
    lines = table.markdown(wide_rows(), MACHINE, "9.9").splitlines()
    cells = [line.count("|") for line in lines[2:]]
    assert set(cells) == {9}
    assert "C++ 9.9" in lines[2]
    assert "GB/s" in lines[4].split("|")[-2]
    assert "MiB" in lines[-1]
    shapes = dict.fromkeys(f"{row.case}, {row.shape}" for row in wide_rows())
    assert [name for line in lines[4:] if (name := line.split("|")[1].strip())] == list(shapes)
    without = table.markdown([row()], MACHINE, None).splitlines()
    assert {line.count("|") for line in without[2:]} == {8}


def test_the_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'torch_memory_saver\[plot\]'"):
        plot.require()


@pytest.mark.parametrize("peer", [None, "9.9"])
def test_the_plot(peer: str | None, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "plot.png"
    plot.draw(str(path), wide_rows(), MACHINE, peer)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot.draw(str(path), [], MACHINE, peer)


@pytest.mark.parametrize("simulated", [False, True])
def test_the_plot_has_every_row_and_a_legend(simulated: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pyplot = plot.require()
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    rows = [*wide_rows(), row("wake-up", "2 x 2", "both", limit=None), row("import", "once", "x", bytes=0)]
    beside = row(operation=f"pause{PEER}", limit=Samples.of([2.0]), target=Target(GAIN, 5.0))
    plot.draw(str(tmp_path / "plot.png"), [*rows, beside], {**MACHINE, "simulated": simulated}, "9.9")
    (figure,) = figures
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(labels) == sorted(f"{row.case}, {row.shape}: {row.operation}" for row in rows)
    numbers = {round(text.xy[1]) for text in axes.texts}
    assert numbers == set(range(len(rows))), "each has a bar with a number, or a number; the C++ package's stands beside it"
    (legend,) = figure.legends
    meanings = [text.get_text() for text in legend.get_texts()]
    targets = [] if simulated else ["target"]
    assert meanings == ["torch_memory_saver", "C++ package 9.9", "100: the limit", *targets]
    marks = [line for line in axes.lines if len(set(line.get_xdata())) == 1 and line.get_linewidth() > 1]
    assert bool(marks) is not simulated
    assert ("times mean nothing" in axes.get_title()) is simulated


def test_nothing_is_judged_on_the_simulated_gpu() -> None:
    missed = row(ours=Samples.of([9.0]), limit=Samples.of([1.0]), target=Target(AT_MOST, 1.15))
    for show in (lambda machine: table.terminal([missed], [], machine, None), lambda m: table.markdown([missed], m, None)):
        assert "<= 1.15x NO" in show(MACHINE)
        assert "1.15x" not in show({**MACHINE, "simulated": True})
        assert "9.00x" in show({**MACHINE, "simulated": True})
