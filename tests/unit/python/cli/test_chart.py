"""Guards the chart of the demo: bars are as long as the memory, and fit."""

from __future__ import annotations

from torch_memory_saver._cli import output

GIB = 1 << 30
MIB = 1 << 20


def test_bars_are_as_long_as_the_memory() -> None:
    stages = [("all", {"a": GIB, "b": GIB}), ("half", {"a": GIB, "b": 0}), ("none", {"a": 0, "b": 0})]
    lines = output.draw(stages, 2 * GIB, ascii_only=True, width=60)
    cells = lines[0].index("|", lines[0].index("|") + 1) - lines[0].index("|") - 1
    assert lines[0].count("#") + lines[0].count("=") == cells
    for line, share in zip(lines, (0.5, 0.5, 0), strict=False):
        assert abs(line.count("#") - cells * share) <= 0.5
    assert {len(line) for line in lines[:3]} == {len(lines[0])}
    assert len(lines[0]) <= 60
    assert lines[0].endswith("2 GiB")
    assert "# a" in lines[3]
    assert "= b" in lines[3]


def test_a_chart_never_overflows() -> None:
    for line in output.draw([("more than there is", {"a": 5 * GIB, "b": GIB})], GIB, ascii_only=False, width=50)[:1]:
        assert len(line) <= 50
        assert "▓" not in line
