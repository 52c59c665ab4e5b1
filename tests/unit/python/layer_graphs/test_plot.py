"""Guards the picture of a schedule: what it shows is the timeline, and it is the same every time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan import bubble_fraction, pipeline_order, plot_schedule

ORDERS = [pipeline_order(4, rank, 8, 2) for rank in range(4)]


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match="pip install matplotlib"):
        plot_schedule(tmp_path / "picture.svg", ORDERS)


def test_a_plot_shows_each_piece_of_work_where_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timeline = plot_schedule(tmp_path / "picture.svg", ORDERS)
    drawn = {name: rows for name, *rows in boxes((tmp_path / "picture.svg").read_text(encoding="utf-8"))}
    left, right = drawn["bubble-0"][:2]
    scale = (right - left) / timeline.step
    assert timeline.bubble == bubble_fraction(4, 8, 2)
    expected = {f"bubble-{rank}": (0.0, timeline.step, rank) for rank in range(4)}
    for rank, row in enumerate(timeline.ranks):
        for work in row:
            kind = "backward" if work.backward else "forward"
            expected[f"{kind}-{rank}-{work.chunk}-{work.microbatch}"] = (work.start, work.end, rank)
    assert drawn.keys() == expected.keys()
    heights = sorted({round(rows[2]) for rows in drawn.values()})
    assert len(heights) == 4
    for name, (start, end, rank) in expected.items():
        assert drawn[name][:2] == pytest.approx([left + start * scale, left + end * scale], abs=0.01), name
        assert round(drawn[name][2]) == heights[rank], "rank 0 is at the top"


def boxes(svg: str) -> list[tuple[str, float, float, float]]:
    """Name, left, right and top of each box."""
    found = re.findall(r'<g id="((?:bubble|forward|backward)-[\d-]+)">\s*<path d="([^"]+)"', svg)
    corners = [(name, [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]) for name, path in found]
    return [(name, min(x for x, _ in at), max(x for x, _ in at), min(y for _, y in at)) for name, at in corners]


def test_a_plot_has_a_title_a_legend_and_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot_schedule(tmp_path / "picture.svg", ORDERS)
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "picture.svg").read_text(encoding="utf-8"))
    assert "4 ranks, 2 chunks each, 8 micro-batches: the bubble is 18.8% of the ideal time, 15.8% of the step" in texts
    named = {"forward, chunk 0", "forward, chunk 1", "backward, chunk 0", "backward, chunk 1", "bubble", "time"}
    assert named | {f"rank {rank}" for rank in range(4)} <= set(texts)
    # Each micro-batch has four pieces of work on each rank. Numbers on the time axis are multiples of 10.
    assert texts.count("7") == 16
    plot_schedule(tmp_path / "plain.svg", [pipeline_order(2, rank, 3) for rank in range(2)], title="Two ranks")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "plain.svg").read_text(encoding="utf-8"))
    assert {"Two ranks", "forward", "backward", "bubble"} <= set(texts)


def test_a_plot_is_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in ("first.svg", "second.svg"):
        plot_schedule(tmp_path / name, ORDERS)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    plot_schedule(str(tmp_path / "picture.png"), ORDERS)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_programs_backend_stays(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    before = dict(matplotlib.rcParams)
    plot_schedule(tmp_path / "picture.svg", ORDERS)
    assert dict(matplotlib.rcParams) == before


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in ("picture.txt", "picture"):
        with pytest.raises(InvalidArgumentError, match=name):
            plot_schedule(tmp_path / name, ORDERS)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        plot_schedule(tmp_path / "file" / "picture.svg", ORDERS)
