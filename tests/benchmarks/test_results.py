"""Guards the arithmetic of the benchmarks, and the table that shows it. Nothing here is measured."""

from __future__ import annotations

from typing import Any

import pytest
from results import Row, markdown, merge
from setting import GIB, MIB, SMALLEST_SCALE, Shape, live_and_dead_sizes

MACHINE = {"device": "A GPU", "processors": 2, "driver": "1.2", "torch": "3.4", "date": "2026-01-02", "simulated": False}


def row(case: str = "retained", shape: str = "2 x 4 MiB", operation: str = "pause", **given: Any) -> Row:
    return Row(case, shape, operation, **{"bytes": 8 * MIB, "ours": [2.0], **given})


@pytest.mark.parametrize(
    ("target", "ours", "limit", "ratio", "met"),
    [
        (0.97, 2.0, 1.96, 0.98, True),
        (0.97, 2.0, 1.9, 0.95, False),
        (2.5, 2.0, 6.0, 3.0, True),
        (None, 2.0, 1.0, 0.5, None),
    ],
)
def test_targets(target: float | None, ours: float, limit: float, ratio: float, met: bool | None) -> None:
    measured = row(ours=[ours], limit=[limit], target=target)
    assert measured.ratio == pytest.approx(ratio)
    assert measured.met is met


def test_the_ratio_is_the_median_of_all_pairs() -> None:
    measured = row(ours=[1.0, 2.0, 30.0], limit=[1.0, 1.5, 1.6])
    assert measured.ratio == pytest.approx(0.75)  # of 1, 1.5, 1.6, their halves and thirtieths


def test_two_equal_sides_at_two_speeds_are_equal() -> None:
    slow, fast = [10.0] * 3 + [20.0] * 2, [10.0] * 2 + [20.0] * 3
    assert row(ours=slow, limit=fast).ratio == pytest.approx(1.0), "the medians are 10 and 20"


def test_a_time_of_zero_and_no_limit() -> None:
    assert row(ours=[0.0], limit=[1.0]).ratio == float("inf")
    assert row(target=0.9).ratio is None
    assert row(target=0.9).met is None


def test_processes_are_merged_in_their_order() -> None:
    rows = [
        row(ours=(), peer=[9.0]),
        row(ours=[1.0], limit=[1.0], target=0.5, limit_name="a copy"),
        row(ours=[3.0], limit=[2.0], target=0.5, limit_name="a copy"),
        row(operation="resume", ours=(), peer=[1.0]),
    ]
    assert merge(rows) == [
        row(ours=[1.0, 3.0], peer=[9.0], limit=[1.0, 2.0], target=0.5, limit_name="a copy"),
    ], "a row that only the peer has is dropped"


def test_the_table() -> None:
    rows = [
        row(ours=[2.0, 1.0, 4.0], limit=[1.0], limit_name="one pinned copy", target=0.97, peer=[8.0]),
        row(operation="resume", ours=[0.000125], bytes=0, limit_name="no limit: no compiler"),
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(rows, MACHINE, "9.9").splitlines()]
    assert lines[0] == ["A GPU, 2 CPUs, driver 1.2, PyTorch 3.4, 2026-01-02. Times are medians with the least and the most."]
    assert lines[2] == ["case", "", "median (spread)", "GB/s", "limit", "ratio", "target", "C++ 9.9"]
    assert lines[4] == [
        *("retained, 2 x 4 MiB", "pause", "2000 ms (1000 - 4000)", "0.0", "1000 ms, one pinned copy"),
        *("50.0%", ">= 97% NO", "8000 ms"),
    ]
    assert lines[5] == ["", "resume", "0.12 ms (0.12 - 0.12)", "-", "no limit: no compiler", "-", "", "-"]


def test_times_of_the_simulated_gpu_are_not_judged() -> None:
    text = markdown([row(limit=[1.0], target=0.97)], MACHINE | {"simulated": True}, None)
    assert text.startswith("This is the simulated GPU: its times mean nothing")
    assert "NO" not in text
    assert "C++" not in text


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [
        (Shape(2000, 16 * MIB), 0.1, Shape(200, 16 * MIB)),
        (Shape(1, 32 * GIB), 0.1, Shape(1, int(32 * GIB * 0.1) // (2 * MIB) * 2 * MIB)),
        (Shape(8, 512 * MIB), SMALLEST_SCALE, Shape(2, 12 * MIB)),
        (Shape(500, 2 * MIB), SMALLEST_SCALE, Shape(2, 2 * MIB)),
        (Shape(500, 0), SMALLEST_SCALE, Shape(500, 0)),
    ],
)
def test_smaller_shapes(shape: Shape, scale: float, expected: Shape) -> None:
    assert shape.scaled(scale) == expected


def test_names_of_shapes() -> None:
    assert [str(shape) for shape in (Shape(1, 32 * GIB), Shape(800, 16 * MIB), Shape(5, 0))] == [
        *("1 x 32 GiB", "800 x 16 MiB", "once"),
    ]


def test_live_and_dead_sizes() -> None:
    pairs = live_and_dead_sizes(GIB, 0.3, 64 << 10, 8 * MIB, seed=1)
    live, dead = (sum(sizes) for sizes in zip(*pairs, strict=True))
    assert live / (live + dead) == pytest.approx(0.3, abs=0.001)
    assert all(64 << 10 <= size <= 8 * MIB and size % 512 == 0 for pair in pairs for size in pair)
    assert pairs == live_and_dead_sizes(GIB, 0.3, 64 << 10, 8 * MIB, seed=1)
