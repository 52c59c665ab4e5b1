"""Guards TMS_DEBUG: which recordings its words start, in which folders, and that a wrong word changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver._engine import background


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """The recordings that are started, of which only the word and the folder are noted."""
    calls: list[tuple[str, str]] = []
    for word in background.recordings:
        monkeypatch.setitem(background.recordings, word, lambda folder, word=word: calls.append((word, folder)))
    monkeypatch.setenv("TMS_DEBUG_DIR", str(tmp_path))
    return calls


def test_each_word_starts_its_recording_in_a_folder_of_its_own(
    started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMS_DEBUG", "oom, History ,snapshots,events,oom,")
    background._start_recordings()
    assert started == [
        ("events", f"{tmp_path}/events"),
        ("snapshots", f"{tmp_path}/snapshots"),
        ("history", f"{tmp_path}/history"),
        ("oom", f"{tmp_path}/oom"),
    ]


def test_an_unknown_word_is_reported_with_the_known_ones_and_ignored(
    started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMS_DEBUG", "evnts,oom")
    background._start_recordings()
    assert [word for word, _ in started] == ["oom"]
    assert [record.getMessage() for record in caplog.records] == [
        "TMS_DEBUG: 'evnts' is ignored (allowed: events, snapshots, history, oom)"
    ]


def test_the_folder_is_in_the_working_directory_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for value, folder in (("", "torch_memory_saver_debug"), (" ", "torch_memory_saver_debug"), ("here", "here")):
        monkeypatch.setenv("TMS_DEBUG_DIR", value)
        assert background.debug_folder() == str(tmp_path / folder)


def test_a_wrong_word_is_reported_once_in_a_process(program: Any, tmp_path: Path) -> None:
    text = """
module.pause()
module.resume()
module.pause()
"""
    done = program(text, TMS_DEBUG="everything", TMS_DEBUG_DIR=str(tmp_path / "none"))
    assert done.stderr.count("TMS_DEBUG: 'everything' is ignored") == 1
    assert list(tmp_path.iterdir()) == []
