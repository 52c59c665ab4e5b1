"""Guards the checks of the TMS_* variables: misspelled names, malformed values, and folders that cannot be written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from findings import assert_complete

from torch_memory_saver.observe._doctor import installation_checks
from torch_memory_saver.observe._doctor.check import Status


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TMS_"):
            monkeypatch.delenv(name)


def test_nothing_is_set() -> None:
    finding = installation_checks.settings()
    assert_complete(finding, Status.OK)
    assert (finding.found, finding.details) == ("none set", ())
    assert_complete(installation_checks.output_folders(), Status.SKIP)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("TMS_DEBUG_FOLDER", "/x", "TMS_DEBUG_FOLDER is unknown; did you mean TMS_DEBUG_DIR?"),
        ("TMS_HOST_MEMORY", "bogus", "TMS_HOST_MEMORY='bogus' is ignored (allowed: release, pool or retain)"),
        ("TMS_HOST_MEMORY_LIMIT_MB", "x", "TMS_HOST_MEMORY_LIMIT_MB='x' is not a limit"),
        ("TMS_LOG_LEVEL", "loud", "TMS_LOG_LEVEL='loud' is ignored"),
        ("TMS_DEBUG", "events,all", "TMS_DEBUG='events,all' is ignored (allowed: events, snapshots, history and oom"),
        (
            "TMS_SHARED_PAGE",
            "pages",
            "TMS_SHARED_PAGE='pages' is ignored (allowed: 1, true, yes, 0, false, no or an absolute",
        ),
        ("TMS_LOCK_DIR", "locks", "TMS_LOCK_DIR='locks' is refused by resume(exclusive=True): it must be an absolute path"),
        ("TMS_RELEASE_CACHED", "-1", "TMS_RELEASE_CACHED='-1' is ignored (allowed: pause, or a number"),
    ],
)
def test_one_mistake_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, found: str) -> None:
    if name == "TMS_HOST_MEMORY":
        monkeypatch.setenv("TMS_LOG_LEVEL", "silent")  # what is asked is asked anyway
    monkeypatch.setenv(name, value)
    finding = installation_checks.settings()
    assert_complete(finding, Status.WARN)
    assert finding.found.startswith(found)
    assert f"{name}={value}" in finding.details


def test_values_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "TMS_HOST_MEMORY": "pool",
        "TMS_LOG_LEVEL": "ERROR",
        "TMS_DEBUG": "OOM, history",
        "TMS_SHARED_PAGE": "/dev/shm",
        "TMS_RELEASE_CACHED": "Pause",
        "TMS_SIMULATED_DEVICES": "2",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    finding = installation_checks.settings()
    assert_complete(finding, Status.OK)
    assert finding.found == "6 set"


def test_several_mistakes_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1")
    monkeypatch.setenv("TMS_INIT_ENABLE_DISK_BACKUP", "1")
    monkeypatch.setenv("TMS_GAURD", "1")
    finding = installation_checks.settings()
    assert_complete(finding, Status.WARN)
    assert finding.found == "2 mistakes"
    assert finding.details[0] == "TMS_GAURD is unknown; did you mean TMS_GUARD?"
    assert finding.details[1].startswith("TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set")


def test_folders_that_can_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMS_DEBUG", "events")
    monkeypatch.setenv("TMS_DEBUG_DIR", str(tmp_path / "new" / "below"))
    monkeypatch.setenv("TMS_METRICS_FILE", str(tmp_path / "metrics-{pid}.txt"))
    finding = installation_checks.output_folders()
    assert_complete(finding, Status.OK)
    assert finding.details == (f"TMS_DEBUG_DIR: {tmp_path}/new/below", f"TMS_METRICS_FILE: {tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "problem"),
    [("pages", None), ("missing/pages", "No such file or directory")],
)
def test_the_folder_of_shared_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, problem: str | None
) -> None:
    """The core makes it, but no folder above it."""
    path = str(tmp_path / folder)
    monkeypatch.setenv("TMS_SHARED_PAGE", path)
    finding = installation_checks.output_folders()
    assert_complete(finding, Status.OK if problem is None else Status.FAIL)
    assert problem is None or finding.found == f"TMS_SHARED_PAGE: {path} cannot be written to: {problem}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["TMS_DEBUG_DIR", "TMS_METRICS_FILE"])
def test_folders_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("TMS_DEBUG", "snapshots")
    (tmp_path / "file").touch()
    for path in ("/proc/none/file", f"{tmp_path}/file/below"):
        monkeypatch.setenv(name, path)
        finding = installation_checks.output_folders()
        assert_complete(finding, Status.FAIL)
        assert finding.found.startswith(f"{name}: ") and "cannot be written to: " in finding.found
