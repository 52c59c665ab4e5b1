"""Guards the picture of memory logs: what is drawn of which rows, and where."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.memory import MemoryRow, plot_memory_log

GIB = 1 << 30


def row(time: float, role: str = "engine", label: str = "", paused: int = 0, other: int | None = 3 * GIB) -> MemoryRow:
    return MemoryRow(
        time, role, 7, 0, label, 0, allocated=4 * GIB, reserved=6 * GIB, physical=6 * GIB - paused, paused=paused,
        device_used=9 * GIB - paused, process=None, other_processes=other,
    )  # fmt: skip


def picture(path: Path, rows: list[MemoryRow]) -> str:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot_memory_log(path, rows)
    return path.read_text(encoding="utf-8")


def points(svg: str, name: str) -> list[int]:
    """The number of points of each line of that name."""
    paths = re.findall(rf'<g id="{name}[^"]*">\s*<path d="([^"]*)"', svg)
    return [len(re.findall(r"[ML] ", path)) for path in paths]


def test_a_panel_for_each_process_with_its_lines(tmp_path: Path) -> None:
    rows = [row(1, label="before sleep"), row(3, label="after sleep", paused=5 * GIB), row(2, "trainer", other=None)]
    rows += [row(5, "trainer", other=None), MemoryRow(4, "tokenizer", 8, None, "")]
    svg = picture(tmp_path / "log.svg", rows)
    assert re.findall(r">([\w, ]+, pid 7, device 0)<", svg) == [
        "engine, rank 0, pid 7, device 0",
        "trainer, rank 0, pid 7, device 0",
    ]
    assert [points(svg, name) for name in ("reserved", "allocated", "device_used")] == [[2, 2]] * 3
    assert points(svg, "other_processes") == [2]  # not of the trainer, to which they are hidden
    assert svg.count('id="paused') == 1  # nothing is paused in the trainer
    assert (svg.count(">before sleep<"), svg.count(">after sleep<")) == (1, 1)
    assert ">GiB<" in svg


def test_many_marks_have_no_labels(tmp_path: Path) -> None:
    svg = picture(tmp_path / "log.svg", [row(time, label="mark") for time in range(30)])
    assert ">mark<" not in svg


def test_small_memory_in_mebibytes_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    rows = [MemoryRow(time, "engine", 7, None, "", 0, reserved=5 << 20, physical=5 << 20) for time in (1, 2)]
    assert ">MiB<" in picture(tmp_path / "log.svg", rows)
    assert picture(tmp_path / "log.svg", rows) == picture(tmp_path / "again.svg", rows)


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="no row has a device"):
        plot_memory_log(tmp_path / "log.svg", [MemoryRow(4, "tokenizer", 8, None, "")])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidArgumentError, match="plot_memory_log needs matplotlib: pip install matplotlib "):
        plot_memory_log(tmp_path / "log.svg", [row(1)])


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(InvalidArgumentError, match="'xyz'"):
        plot_memory_log(tmp_path / "log.xyz", [row(1)])
