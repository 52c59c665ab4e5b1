"""Guards TMS_DEBUG: which recordings its words start, in which folders, and that a wrong word changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import PRELUDE, TIMEOUT_S, environment

from torch_memory_saver import _core, _startup
from torch_memory_saver._additions import ADDITIONS
from torch_memory_saver._engine import background, variables
from torch_memory_saver.errors import DriverUnavailableError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """The recordings that are started, of which only the word and the folder are noted."""
    calls: list[tuple[str, str]] = []

    def noted(event: str) -> dict[str, Any]:
        return {word: lambda folder, word=word: calls.append((word, folder)) for word in ADDITIONS[event]}

    monkeypatch.setattr(background, "added", noted)
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


def test_every_request_is_known_before_the_package_is_imported() -> None:
    assert set(_startup.REQUESTS) == {"TMS_DEBUG", *ADDITIONS["variable"]}


def test_an_unknown_word_is_reported_with_the_known_ones_and_ignored(
    started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMS_DEBUG", "evnts,oom")
    background._start_recordings()
    assert [word for word, _ in started] == ["oom"]
    assert [record.getMessage() for record in caplog.records] == [
        "TMS_DEBUG: 'evnts' is ignored (allowed: events, snapshots, history, oom); did you mean events?"
    ]


def test_a_relative_folder_is_where_the_package_was_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imported = os.getcwd()
    monkeypatch.setattr(variables, "_DIRECTORY", imported)
    monkeypatch.chdir(tmp_path)
    for value, folder in (("", "torch_memory_saver_debug"), (" ", "torch_memory_saver_debug"), ("./here", "here")):
        monkeypatch.setenv("TMS_DEBUG_DIR", value)
        assert background.debug_folder() == os.path.join(imported, folder)


def run_in(folder: Path, text: str, **settings: str) -> None:
    """Run a program in a working directory."""
    command = [sys.executable, "-c", text]
    subprocess.run(command, env=environment(True, **settings), cwd=folder, timeout=TIMEOUT_S, check=True)


def test_nothing_is_recorded_in_another_working_directory(tmp_path: Path) -> None:
    imported, later = tmp_path / "imported", tmp_path / "later"
    imported.mkdir()
    later.mkdir()
    text = f"""
os.chdir({str(later)!r})
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
module.pause()
"""
    run_in(imported, PRELUDE + text, TMS_DEBUG="events", TMS_METRICS_FILE="metrics.prom")
    assert sorted(path.name for path in imported.iterdir()) == ["metrics.prom", "torch_memory_saver_debug"]
    assert list(later.iterdir()) == []


def test_an_import_in_a_removed_working_directory_works(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run_in(gone, f"import os; os.rmdir({str(gone)!r})\n{PRELUDE}module.stats()")


@pytest.mark.usefixtures("simulator")
def test_variables_have_no_effect_in_secure_execution_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native core finds out whether the process is in that mode (tests/unit/base/test_config.c)."""
    _core.device_count()  # from here on the core has read its own variables
    started: list[str] = []
    monkeypatch.setenv("TMS_DEBUG", "oom")
    monkeypatch.setenv("TMS_DEBUG_DIR", "/foreign")
    monkeypatch.setenv("TMS_METRICS_FILE", "/foreign/metrics")
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    monkeypatch.setenv("TMS_CUDA_DRIVER", "/foreign/driver.so")
    additions = {"recording": {"oom": started.append}, "variable": {"TMS_METRICS_FILE": started.append}, "first use": {}}
    monkeypatch.setattr(background, "added", additions.__getitem__)
    for secure, expected in ((True, []), (False, ["/foreign/oom", "/foreign/metrics"])):
        monkeypatch.setattr(_core, "secure_execution", secure)
        background.start_from_environment.__wrapped__()
        assert started == expected
        assert variables.init_enabled() is not secure
        assert variables.driver_library() == ("libcuda.so.1" if secure else "/foreign/driver.so")
    assert background.debug_folder() == "/foreign"


@pytest.mark.parametrize("path", ["./driver.so", "folder/driver.so", "../driver.so"])
def test_a_relative_driver_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", path)
    with pytest.raises(DriverUnavailableError, match=f"'{path}' is not an absolute path"):
        variables.driver_library()
    monkeypatch.setenv("TMS_CUDA_DRIVER", "libdriver.so")  # the loader does not look for names in the working directory
    assert variables.driver_library() == "libdriver.so"


def test_a_wrong_word_is_reported_once_in_a_process(program: Any, tmp_path: Path) -> None:
    text = """
module.pause()
module.resume()
module.pause()
"""
    done = program(text, TMS_DEBUG="everything", TMS_DEBUG_DIR=str(tmp_path / "none"))
    assert done.stderr.count("TMS_DEBUG: 'everything' is ignored") == 1
    assert list(tmp_path.iterdir()) == []
