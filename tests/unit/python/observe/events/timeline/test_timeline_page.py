"""Guards the page of a timeline: it stands alone, runs no text of a file, shows true levels, and says what it leaves out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser
from pages import HOSTILE, Elements, assert_only_own_code_runs, assert_stands_alone, data_of, opened
from recorded_logs import GIB, MIB, Process

from torch_memory_saver.observe.events import EventLog, write_timeline
from torch_memory_saver.observe.events.timeline.html import document, page
from torch_memory_saver.observe.events.timeline.merge import hosts_of

#: Characters that cannot be encoded, as a file can have them.
HALF = "\ud83d"


def two_processes(tag: str = "kv", role: str = "engine") -> list[EventLog]:
    engine, trainer = Process(1, role=role, host=role), Process(2, role="trainer", host=role)
    engine.allocate(10, tag, 4 * GIB)
    engine.sample(900, 8 * GIB - 4 * GIB - 512 * MIB)
    engine.pause(1000, tag, 4 * GIB, backup=GIB)
    trainer.allocate(2000, "params", 6 * GIB)
    trainer.fail(3000, tag, 16 * GIB)
    return [engine.log(5000, exited=True), trainer.log(4000)]


def html(logs: list[EventLog]) -> str:
    return page(hosts_of(logs))


def levels_of(gpu: dict[str, Any]) -> list[int]:
    """What each band holds in the end."""
    levels = [0] * len(gpu["bands"])
    for band, size in zip(gpu["of"], gpu["bytes"], strict=True):
        levels[band] = size
    return levels


def labels_of(text: str) -> list[str]:
    """What the script says about each picture, with the highest levels that it found."""
    return re.findall(r'<canvas [^>]*aria-label="([^"]*)"', text)


def test_the_page_stands_alone() -> None:
    text = html(two_processes())
    assert_stands_alone(text)
    assert_only_own_code_runs(text)


def test_text_of_a_file_is_never_markup() -> None:
    plain, hostile = html(two_processes()), html(two_processes(HOSTILE, HOSTILE))
    assert Elements(hostile).names == Elements(plain).names
    assert HOSTILE in data_of(hostile)["tags"]
    assert data_of(hostile)["hosts"][0]["name"] == HOSTILE
    assert "<img src=x" in Elements(hostile).texts["pre"][0]


@pytest.mark.parametrize("tag", ["{{STYLE}}", "a\nb", HALF, "\u2028", "\x00", "ö 模型", "a" * 2000])
def test_odd_tags_are_shown(tag: str, tmp_path: Path) -> None:
    path = write_timeline(tmp_path / "out.html", logs=two_processes(tag, tag))
    text = path.read_text(encoding="utf-8")
    assert tag in data_of(text)["tags"]
    lines = Elements(text).texts["pre"][0].splitlines()
    assert [line.split()[-1] for line in lines if line] == ["(MiB)", "end", "0.0", "0.0"], "a row each"


def test_the_data_of_two_processes() -> None:
    (host,) = data_of(html(two_processes()))["hosts"]
    (gpu,) = host["gpus"]
    assert (host["length"], host["beginMs"]) == (4990, (10**18 + 10) / 1e6)
    assert (gpu["uuid"], gpu["total"], gpu["ordinals"]) == ("GPU-a", 8 * GIB, [[0, 0], [1, 0]])
    assert gpu["bands"] == [
        [0, "resident", 0, 0],
        [0, "paused", 0, 0],
        [0, "backup", 0, 0],
        [1, "resident", 1, 0],
        [-1, "other", -1, 0],
    ]
    assert gpu["stacks"] == [[0, 3, 4], [0, 1], [3], [2], []]
    assert levels_of(gpu) == [0, 0, 0, 6 * GIB, 512 * MIB], "the engine has exited"
    assert sum(gpu["times"]) == 4990
    engine, trainer = host["processes"]
    assert (engine["begin"], engine["taken"], engine["exited"], engine["dropped"]) == (0, 4990, True, 0)
    ((call),) = engine["calls"]
    assert {name: call[name] for name in ("what", "at", "ns", "tags", "devices", "bytes", "copied")} == {
        "what": "pause",
        "at": 990,
        "ns": 100,
        "tags": [0],
        "devices": [0],
        "bytes": 4 * GIB,
        "copied": GIB,
    }
    assert call["phases"] == [["turn", -1, 0, 10, 0, 0, "OK"], ["copy", 0, 10, 40, 0, GIB, "OK"]]
    ((failure),) = trainer["failures"]
    assert (failure["at"], failure["bytes"], failure["status"]) == (2990, 16 * GIB, "OUT_OF_DEVICE_MEMORY")


def test_the_table_has_peaks_and_ends() -> None:
    lines = Elements(html(two_processes())).texts["pre"][0].splitlines()
    assert [line.split() for line in lines if line][2:] == [
        ["engine,", "pid", "1", "0", "kv", "4096.0", "0.0", "4096.0", "0.0", "1024.0", "0.0"],
        ["trainer,", "pid", "2", "0", "params", "6144.0", "6144.0", "0.0", "0.0", "0.0", "0.0"],
    ]


def test_the_table_has_the_rows_of_the_highest_peaks() -> None:
    process = Process(1)
    for number in range(450):
        process.allocate(number, f"tag {number}", (number + 1) * MIB)
    lines = Elements(html([process.log(500)])).texts["pre"][0].splitlines()
    assert len(lines) == 2 + 400 + 1
    assert lines[-1] == "and 50 rows more, of lower peaks"
    assert not any("tag 49 " in line for line in lines) and any("tag 50 " in line for line in lines)


def test_a_wrapped_ring_says_where_it_begins() -> None:
    process = Process(1, rank=3)
    for at in range(1, 2000):
        process.allocate(at, "kv", MIB)
    data = data_of(html([process.log(3000, capacity=100)]))
    (host,) = data["hosts"]
    (shown,) = host["processes"]
    assert (shown["dropped"], shown["begin"], host["length"]) == (1899, 0, 1100)
    assert host["gpus"][0]["bytes"][0] == 1899 * MIB
    assert levels_of(host["gpus"][0]) == [1999 * MIB]
    (note,) = data["notes"]
    assert note.startswith("engine, rank 3, pid 1: the ring dropped 1,899 earlier events.")


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_MAX_ROWS", 1000)
    monkeypatch.setattr(document, "_MAX_CALLS", 10)
    monkeypatch.setattr(document, "_MAX_FAILURES", 5)
    process = Process(1)
    for step in range(20_000):
        process.allocate(1_000_000 * step, "kv", MIB)
    for step in range(20):
        process.pause(10**11 + step * 10**6, "kv", MIB, ns=100 + step)
    for step in range(9):
        process.fail(10**12 + step, "kv", GIB)
    text = html([process.log(2 * 10**12)])
    data = data_of(text)
    (host,) = data["hosts"]
    assert len(host["gpus"][0]["of"]) < 10_000
    assert [call["ns"] for call in host["processes"][0]["calls"]] == list(range(110, 120)), "the longest, in order"
    assert [failure["at"] for failure in host["processes"][0]["failures"]] == [10**12 + step for step in range(4, 9)]
    assert levels_of(host["gpus"][0]) == [(20_000 - 20) * MIB, 20 * MIB]
    assert max(host["gpus"][0]["bytes"]) == 20_000 * MIB
    assert [re.sub(r"[\d,]+", "N", note) for note in data["notes"]] == [
        "GPU N: N of N changes are drawn. The highest levels are among them; a large zoom lacks details.",
        "engineN pid N: N of N calls are drawnN those that failed and the longest.",
        "engineN pid N: the last N of N failures outside of calls are drawn.",
    ]


def test_logs_without_boot_id_or_uuid_are_named() -> None:
    alone, unnamed, other = Process(1, boot_id=""), Process(2, uuid=""), Process(3)
    for process in (alone, unnamed, other):
        process.allocate(1, "kv", MIB)
    notes = data_of(html([alone.log(2), unnamed.log(2), other.log(2)]))["notes"]
    assert notes == [
        "engine, pid 1 has no boot id, so it is drawn by itself.",
        "GPU 0 of engine, pid 2 has no UUID, so it is drawn by itself.",
    ]


@needs_browser
def test_in_a_browser_the_script_finds_the_same_levels(tmp_path: Path) -> None:
    text = opened(write_timeline(tmp_path / "page.html", logs=two_processes()))
    assert labels_of(text) == [
        "GPU 0: at most 6.5 GiB of 8.0 GiB, GPU-a",
        "engine, pid 1: at most 4.0 GiB reserved, 1.0 GiB in backups, 1 call",
        "trainer, pid 2: at most 6.0 GiB reserved",
    ]
    assert "data-opened-ms" in text
    assert Elements(text).texts["title"] == ["Memory timeline"]


@needs_browser
def test_in_a_browser_the_labels_of_an_axis_are_exact(tmp_path: Path) -> None:
    script = (Path(document.__file__).parent / "columns.js").read_text()
    peaks = [GIB, 3 * GIB // 2, 80 * GIB, 300 * MIB]
    label = "(up) => { const { step, textScale } = sizeTicks(up, 0); const labels = []; "
    label += "for (let bytes = 0; bytes <= up; bytes += step) labels.push(size(bytes, textScale)); return labels; }"
    code = f"{script}\ndocument.body.textContent = JSON.stringify({peaks}.map({label}));"
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><body></body><script>{code}</script>")
    assert json.loads(Elements(opened(path)).texts["body"][0]) == [
        ["0", "256 MiB", "512 MiB", "768 MiB", "1,024 MiB"],
        ["0", "0.5 GiB", "1.0 GiB", "1.5 GiB"],
        ["0", "16.0 GiB", "32.0 GiB", "48.0 GiB", "64.0 GiB", "80.0 GiB"],
        ["0", "64.0 MiB", "128 MiB", "192 MiB", "256 MiB"],
    ]


@needs_browser
def test_in_a_browser_hostile_text_stays_text(tmp_path: Path) -> None:
    text = opened(write_timeline(tmp_path / "page.html", logs=two_processes(HOSTILE, HOSTILE)))
    elements = Elements(text)
    assert elements.texts["title"] == ["Memory timeline"]
    assert "img" not in elements.names
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in text


@needs_browser
def test_in_a_browser_a_wrapped_ring_and_several_hosts(tmp_path: Path) -> None:
    wrapped, elsewhere, empty = Process(1), Process(2, boot_id="b", host="other"), Process(3, boot_id="c", host="idle")
    for at in range(1, 300):
        wrapped.allocate(at * 1000, "kv", MIB)
    elsewhere.allocate(1, "kv", 2 * MIB)
    logs = [wrapped.log(10**6, capacity=50), elsewhere.log(1), empty.log(1)]
    text = opened(write_timeline(tmp_path / "page.html", logs=logs))
    assert re.findall(r"<h2>([^<]*)</h2>", text) == ["node", "other", "idle"]
    assert labels_of(text) == [
        "GPU 0: at most 299 MiB by these processes, of 8.0 GiB, GPU-a",
        "engine, pid 1: at most 299 MiB reserved",
        "GPU 0: at most 2.0 MiB by these processes, of 8.0 GiB, GPU-a",
        "engine, pid 2: at most 2.0 MiB reserved",
    ]
    assert "No event of this machine changes memory." in text


@needs_browser
def test_in_a_browser_the_begin_of_a_long_tag_is_shown(tmp_path: Path) -> None:
    """A page must not be full of one tag. The whole tag is a tooltip."""
    text = opened(write_timeline(tmp_path / "page.html", logs=two_processes("模" * 5000)))
    assert "</span>\u2068" + "模" * 59 + "…\u2069</button>" in text
    assert ("title", "模" * 5000) in Elements(text).attributes


@needs_browser
def test_in_a_browser_the_legend_has_each_colour_of_the_phases(tmp_path: Path) -> None:
    text = opened(write_timeline(tmp_path / "page.html", logs=two_processes("weights")))
    legend = text.partition('id="legend"')[2].partition("</ul>")[0]
    entries = re.findall(r'data-phase="(\w+)" style="background: ([^;]+);"></span>([^<]+)', legend)
    assert [name for name, _, _ in entries] == ["turn", "synchronize", "plan", "copy", "unmap", "create", "map"]
    hues = dict(re.findall(r"(\w+): (\d+)", text.partition("PHASE_HUES = {")[2].partition("}")[0]))
    assert set(hues) == {"turn", "synchronize", "plan", "create", "map", "copy", "unmap", "discard", "wait"}
    assert len({color for _, color, _ in entries}) == len(set(hues.values())) == len(entries)


def test_no_tag_has_the_hue_of_a_phase() -> None:
    text = html(two_processes())
    tags = [int(hue) for hue in text.partition("const HUES = [")[2].partition("]")[0].split(",")]
    phases = dict(re.findall(r"(\w+): (\d+)", text.partition("PHASE_HUES = {")[2].partition("}")[0]))
    hues = {int(hue) for name, hue in phases.items() if name not in ("turn", "wait")}  # These are grey.
    assert len(tags) == len(set(tags)) == 10 and len(hues) == 6
    assert min(abs(tag - hue) for tag in tags for hue in hues) >= 20


@needs_browser
def test_in_a_browser_every_tag_and_every_phase_has_its_own_colour(tmp_path: Path) -> None:
    process = Process(1)
    for at in range(12):
        process.allocate(at, f"tag {at}", MIB)
    text = opened(write_timeline(tmp_path / "page.html", logs=[process.log(1000)]))
    colours = re.findall(r'data-(?:tag|phase)="\w+"[^>]* style="background: ([^;]+);"', text)
    assert len(colours) == 12 + 7
    assert len(set(colours)) == len(colours)


@needs_browser
@pytest.mark.parametrize(("tags", "named"), [(13, False), (14, True)])
def test_in_a_browser_the_legend_names_the_band_of_many_tags(tmp_path: Path, tags: int, named: bool) -> None:
    process = Process(1)
    for at in range(tags):
        process.allocate(at, f"tag {at}", MIB)
    text = opened(write_timeline(tmp_path / "page.html", logs=[process.log(1000)]))
    assert ("tags with less memory, together" in text.partition('id="hosts"')[0]) == named
