"""Guards the files of out-of-memory reports: names, permissions, how many are kept, and failures to write them."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver.observe._out_of_memory import folder as module
from torch_memory_saver.observe._out_of_memory.folder import MAX_OF_PROCESS, ReportFolder

#: 2026-11-25 03:39:36.385 UTC.
TIME_NS = 1_795_577_976_385_000_000
MS = 1_000_000


def write(folder: ReportFolder, number: int, time_ns: int = TIME_NS, rank: int | None = None) -> Path | None:
    return folder.write(f"text {number}", f'"data {number}"', number=number, rank=rank, time_ns=time_ns)


def numbers(path: Path) -> list[int]:
    """Of the reports in a folder, each of which has both files."""
    names = sorted(entry.name for entry in path.iterdir())
    stems = sorted({name.rsplit(".", 1)[0] for name in names})
    assert names == sorted(f"{stem}.{suffix}" for stem in stems for suffix in ("txt", "json"))
    return sorted(int(stem.rsplit("-", 1)[1]) for stem in stems)


def test_both_files_are_named_by_time_rank_process_and_number(tmp_path: Path) -> None:
    written = write(ReportFolder(tmp_path / "new" / "folder"), 3, rank=7)
    assert written == tmp_path / "new" / "folder" / f"oom-20261125T033936.385Z-rank7-pid{os.getpid()}-3.txt"
    assert written.read_text() == "text 3"
    assert written.with_name(written.name.replace(".txt", ".json")).read_text() == '"data 3"'
    assert len(list(written.parent.iterdir())) == 2
    unranked = write(ReportFolder(tmp_path), 1)
    assert unranked is not None
    assert re.fullmatch(r"oom-20261125T033936\.385Z-pid\d+-1\.txt", unranked.name)


def test_only_this_user_can_read_them_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(ReportFolder(tmp_path), 1)
    finally:
        os.umask(before)
    assert [entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_process_keeps_its_first_report_and_its_latest(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path)
    for number in range(1, 3 * MAX_OF_PROCESS + 1):
        assert write(folder, number, TIME_NS + number * MS) is not None
        assert len(numbers(tmp_path)) == min(number, MAX_OF_PROCESS)
    assert numbers(tmp_path) == [1, *range(2 * MAX_OF_PROCESS + 2, 3 * MAX_OF_PROCESS + 1)]


def test_a_folder_keeps_the_latest_reports_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FOLDER", 4)
    for number in range(1, 8):  # each of another process: a job that crashes and is restarted
        write(ReportFolder(tmp_path), number, TIME_NS + number * MS)
    assert numbers(tmp_path) == [4, 5, 6, 7]


def test_other_files_of_the_folder_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FOLDER", 1)
    others = ["notes.txt", "oom-1.txt", "oom-20261125T033936.385Z-pid1-1.txt.gz", "rank0-pid1.json"]
    for name in others:
        (tmp_path / name).write_text("")
    left = ".oom-20261125T033936.385Z-pid1-1.json.1-2.tmp"  # of a process that was killed
    (tmp_path / left).write_text("")
    written = write(ReportFolder(tmp_path), 2, TIME_NS + MS)
    assert written is not None
    ours = [written.name, written.name.replace(".txt", ".json")]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*others, *ours])


def test_what_another_process_has_removed_is_no_failure(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path)
    for number in range(1, MAX_OF_PROCESS + 3):
        write(folder, number)
        for entry in tmp_path.iterdir():
            entry.unlink()
    assert folder.failures == 0


def test_a_forked_child_does_not_count_its_parents(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path)
    for number in range(1, MAX_OF_PROCESS + 1):
        write(folder, number, TIME_NS)
    folder.restart()
    write(folder, 99, TIME_NS + MS)
    assert numbers(tmp_path) == [*range(1, MAX_OF_PROCESS + 1), 99]


@pytest.mark.parametrize("failing", [".txt", ".json"])
def test_a_full_disk_is_logged_once_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    real = os.replace

    def replace(source: Any, target: Any, **folders: int) -> None:
        if str(target).endswith(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target, **folders)

    monkeypatch.setattr(os, "replace", replace)
    folder = ReportFolder(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = [write(folder, number) for number in (1, 2, 3)]
    assert folder.failures == 3
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "make room or choose another folder" in record.getMessage()
    # The text is worth having without the data.
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert all(name.endswith(".txt") for name in names)
    assert [path is None for path in found] == [failing == ".txt"] * 3
    assert len(names) == (0 if failing == ".txt" else 3)


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    folder = ReportFolder(tmp_path / "file" / "reports")
    assert write(folder, 1) is None
    assert folder.failures == 1
    assert (tmp_path / "file").read_text() == ""


def test_reports_that_may_not_be_removed_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as reports in a folder that belongs to another user."""
    monkeypatch.setattr(module, "MAX_IN_FOLDER", 1)
    folder = ReportFolder(tmp_path)
    write(folder, 1)

    def refuse(name: str, **folders: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr(os, "unlink", refuse)
    assert write(folder, 2, TIME_NS + MS) is not None
    assert folder.failures == 0
    assert numbers(tmp_path) == [1, 2]
