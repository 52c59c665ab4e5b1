"""Guards that the pictures of docs match the benchmark's table, the demo, the schedule and the runs of the core."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from document_blocks import REPOSITORY, pages

from torch_memory_saver.layer_graphs.plan.timeline import run_orders

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)

_PRINTED = """
  generate       |##=== | 290 MiB
  paused         |      |   2 MiB
  wake weights   |##++. | 354 MiB
                  # weights   = kv_cache   + trainer   . other

Every check held.
"""


def _load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_picture_of_the_benchmark_is_that_of_its_table() -> None:
    picture = _load("draw_performance")
    assert len(picture.bars()) > 20
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(), "run: python docs/draw_performance.py"


def test_the_picture_of_the_demo_has_its_stages() -> None:
    picture = _load("draw_demo")
    drawn = picture.PICTURE.read_text(encoding="utf-8")
    assert [name for name, caption in picture._CAPTIONS.items() if name not in drawn or caption not in drawn] == []


def test_the_picture_of_an_example_has_the_stages_that_it_prints() -> None:
    picture = _load("draw_example")
    drawn = re.findall(r">(\d+) MiB</text>.*?>([^<>]+)</text>", picture.PICTURE.read_text(encoding="utf-8"), re.DOTALL)
    rows = [(int(size), name) for size, name in drawn]
    printed = re.findall(r'show\("([^"]*)"\)', picture.EXAMPLE.read_text(encoding="utf-8"))
    assert [name for _, name in rows] == printed
    text = "".join(f"{size:6} MiB in use: {name}\n  ok: a check\n" for size, name in rows)
    assert picture.draw(picture.stages(text)) == picture.PICTURE.read_text(encoding="utf-8"), (
        "run: python docs/draw_example.py"
    )


def test_the_picture_of_the_schedule_has_its_work() -> None:
    picture = _load("draw_schedule")
    drawn = re.findall(r'<g id="(forward|backward)-(\d+)-(\d+)-(\d+)">', picture.PICTURE.read_text(encoding="utf-8"))
    assert drawn == [
        ("backward" if work.backward else "forward", str(rank), str(work.chunk), str(work.microbatch))
        for rank, row in enumerate(run_orders(picture.orders()).ranks)
        for work in row
    ], "run: python docs/draw_schedule.py"


def test_the_picture_of_the_schedule_is_what_is_drawn(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = _load("draw_schedule")
    committed = picture.PICTURE.read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("the picture was drawn with another release of matplotlib, which places things elsewhere")
    picture.draw(tmp_path / "schedule.svg")
    assert (tmp_path / "schedule.svg").read_text(encoding="utf-8") == committed, "run: python docs/draw_schedule.py"


def test_the_picture_of_runs_is_what_the_core_does() -> None:
    picture = _load("draw_runs")
    stages = picture.stages()
    committed = (picture.IMAGES / "runs.svg").read_text(encoding="utf-8")
    assert committed == picture.draw(stages, picture.COLORS), "run: python docs/draw_runs.py"
    assert [len(stage.handles) for stage in stages[:3]] == [picture.ALLOCATIONS, 0, stages[2].calls["cuMemCreate"]]
    assert stages[2].calls["cuMemCreate"] < picture.ALLOCATIONS / 4
    assert [stage.slack_bytes for stage in stages] == [0, 0, 0, 2 * picture.BYTES, 2 * picture.BYTES - picture.SMALL, 0]


def test_every_picture_has_its_dark_version() -> None:
    darken = _load("darken")
    pictures = [path for path in darken.IMAGES.iterdir() if not path.stem.endswith("-dark")]
    assert len(pictures) > 8
    for picture in pictures:
        dark = picture.with_name(f"{picture.stem}-dark{picture.suffix}")
        assert dark.exists(), "run: make pages"
        if picture.suffix == ".svg":
            expected = darken.dark_svg(picture.read_text(encoding="utf-8"))
            assert dark.read_text(encoding="utf-8") == expected, f"{dark.name}: run make pages"


def test_pages_show_each_picture_in_both_schemes() -> None:
    for page in [*pages(), REPOSITORY / "ARCHITECTURE.md"]:
        shown = re.findall(r"!\[[^\]]*\]\((\S*images/\S+?)\)", page.read_text(encoding="utf-8"))
        light = [name for name in shown if name.endswith("#gh-light-mode-only")]
        dark = [name for name in shown if name.endswith("#gh-dark-mode-only")]
        assert len(light) + len(dark) == len(shown), page
        expected = [re.sub(r"\.(svg|png)#gh-light", r"-dark.\1#gh-dark", name) for name in light]
        assert dark == expected, page


def test_a_colour_becomes_one_of_the_other_lightness() -> None:
    dark_color = _load("darken").dark_color
    assert dark_color("#fff") == dark_color("white") == "#1e2129"
    assert dark_color("#000000") == dark_color("black") == "#e6e9ee"
    red, green, blue = bytes.fromhex(dark_color("#800000")[1:])
    assert red > 2 * green and red > 2 * blue


def test_a_chart_is_read_as_it_was_printed() -> None:
    rows = _load("draw_demo").stages(_PRINTED)
    assert [(row.name, row.amount) for row in rows] == [
        ("generate", "290 MiB"),
        ("paused", "2 MiB"),
        ("wake weights", "354 MiB"),
    ]
    ends = [{kind: round(end * 6) for kind, end in row.ends} for row in rows]
    assert ends[0] == {"weights": 2, "kv_cache": 5, "trainer": 0, "other": 0}
    assert ends[1] == dict.fromkeys(ends[0], 0)
    assert ends[2] == {"weights": 2, "kv_cache": 0, "trainer": 4, "other": 5}
