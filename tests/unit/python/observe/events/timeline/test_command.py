"""Guards the command `timeline`: the files and folders that it reads, and its one sentence for those that it cannot."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import data_of
from recorded_logs import MIB, Process

from torch_memory_saver._cli.main import main
from torch_memory_saver.observe.events import write_events


def event_file(path: Path, pid: int = 1, count: int = 3) -> Path:
    process = Process(pid)
    for at in range(count):
        process.allocate(at, "kv", MIB)
    return write_events(path, log=process.log(100 + count))


def pids(page: Path) -> list[str]:
    data = data_of(page.read_text(encoding="utf-8"))
    return [process["name"] for host in data["hosts"] for process in host["processes"]]


def test_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = event_file(tmp_path / "single.json", 1)
    event_file(tmp_path / "events" / "pid2.json", 2)
    event_file(tmp_path / "events" / "pid3.json", 3)
    (tmp_path / "events" / "notes.txt").touch()
    page = tmp_path / "out.html"
    assert main(["timeline", str(single), str(tmp_path / "events"), "-o", str(page)]) == 0
    assert pids(page) == ["engine, pid 1", "engine, pid 2", "engine, pid 3"]
    assert capsys.readouterr().out == f"{page}: 9 events of 3 processes\n"


def test_the_folder_of_a_recorded_run(tmp_path: Path) -> None:
    event_file(tmp_path / "run" / "events" / "pid2.json", 2)
    page = tmp_path / "out.html"
    assert main(["timeline", str(tmp_path / "run"), "-o", str(page)]) == 0
    assert pids(page) == ["engine, pid 2"]


def test_of_two_files_of_a_process_the_latest_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late, early = event_file(tmp_path / "a.json", count=5), event_file(tmp_path / "b.json", count=3)
    assert main(["timeline", str(late), str(early), "-o", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out.endswith(": 5 events of 1 process\n")
    assert main(["timeline", str(early), str(late), "-o", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out.endswith(": 5 events of 1 process\n")


def test_a_path_that_the_encoding_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.html"))
    assert main(["timeline", str(event_file(tmp_path / "a.json")), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/\\udcff.html: 3 events of 1 process\n"
    assert page.exists()


def test_without_an_output_it_is_timeline_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = event_file(tmp_path / "events.json")
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", str(path)]) == 0
    assert pids(tmp_path / "timeline.html") == ["engine, pid 1"]


def newer(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.write_text(""), "is not a file of write_events: it is empty"),
        (lambda path: path.write_text("{"), "is not a file of write_events: it is not JSON"),
        (lambda path: path.write_text("[1]"), 'its key "format" is not "torch_memory_saver.events"'),
        (newer, "its version is 2, and this package reads version 1: upgrade torch_memory_saver to read it"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "has no event file (*.json): name the folder events of TMS_DEBUG_DIR"),
        (lambda path: write_events(path, log=Process(1).log(5)), "no file has an event: nothing was allocated"),
    ],
    ids=["empty", "malformed", "another", "newer", "missing", "empty folder", "no events"],
)
def test_what_cannot_be_drawn_is_one_sentence(
    change: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = event_file(tmp_path / "events.json")
    change(path)
    page = tmp_path / "out.html"
    assert main(["timeline", str(path), "-o", str(page)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("torch-memory-saver timeline: error: ") and sentence in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not page.exists()


def test_a_foreign_file_in_a_folder_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    event_file(tmp_path / "events.json")
    (tmp_path / "config.json").write_text("{}")
    assert main(["timeline", str(tmp_path), "-o", str(tmp_path / "out.html")]) == 0
    (record,) = caplog.records
    assert f"{tmp_path}/config.json is not a file of write_events" in record.getMessage()
    assert record.getMessage().endswith(". It is skipped")


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = event_file(tmp_path / "events.json")
    for page in (path / "new" / "out.html", tmp_path):
        assert main(["timeline", str(path), "-o", str(page)]) == 2
        captured = capsys.readouterr()
        assert (
            f" timeline: error: {page}: " in captured.err
            and "the page was not written; choose another folder" in captured.err
        )
        assert captured.err.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events.json"]


def test_a_missing_folder_of_the_page_is_made(tmp_path: Path) -> None:
    page = tmp_path / "new" / "folder" / "out.html"
    assert main(["timeline", str(event_file(tmp_path / "events.json")), "-o", str(page)]) == 0
    assert pids(page) == ["engine, pid 1"]


def test_the_command_needs_neither_pytorch_nor_a_gpu(command: Any, tmp_path: Path) -> None:
    path = event_file(tmp_path / "events.json")
    # A package torch that fails at import, before the installed one in the path.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    done = command(
        "timeline", str(path), "-o", str(tmp_path / "out.html"), PYTHONPATH=f"{tmp_path}:{':'.join(filter(None, sys.path))}"
    )
    assert done.stdout == f"{tmp_path / 'out.html'}: 3 events of 1 process\n"
    assert pids(tmp_path / "out.html") == ["engine, pid 1"]
