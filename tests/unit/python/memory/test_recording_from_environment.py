"""Guards the variables that record a program without a change of it: what they start, when, and what they never disturb."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recording_torch import RecordingTorch

from torch_memory_saver import _core
from torch_memory_saver._engine import background
from torch_memory_saver._torch import history, layer
from torch_memory_saver.memory import recording_from_environment as module
from torch_memory_saver.memory.moments import moments
from torch_memory_saver.memory.recording_from_environment import Period, read_period


@pytest.fixture
def torch(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> RecordingTorch:
    """torch, of which this process has not used CUDA yet, and a process that has started nothing."""
    fake = RecordingTorch("2.11.0")
    fake.cuda.is_initialized = lambda: False
    for name in ("imported", "require_module"):
        monkeypatch.setattr(layer, name, lambda: fake)
    monkeypatch.setattr(layer, "_at_first_use", [])
    monkeypatch.setattr(history, "_recorder", history._Recorder())
    monkeypatch.setattr(_core, "active_devices", lambda: 1)
    monkeypatch.setattr(module, "before_pause", background.RegisteredWork())
    for name in ("TMS_SNAPSHOT_DIR", "TMS_SNAPSHOT_EVERY", "TMS_SNAPSHOT_ROLE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return fake


class Recorded(background.Periodic):
    """A periodic work that no thread does."""

    made: ClassVar[list[Recorded]] = []

    def start(self) -> None:
        self.made.append(self)


@pytest.fixture
def periodic(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(module, "Periodic", Recorded)
    return Recorded.made


def test_a_number_is_of_pauses_and_one_with_s_is_of_seconds() -> None:
    assert read_period("10") == Period(pauses=10)
    assert read_period("30s") == Period(seconds=30)
    assert read_period("0.5s") == Period(seconds=0.5)
    for text in ("", "0", "-1", "1.5", "0s", "-1s", "s", "nans", "infs", "10 pauses", "1m"):
        assert read_period(text) is None, text


def test_the_history_begins_when_the_package_uses_cuda_and_not_before(torch: RecordingTorch) -> None:
    module.start_history("500")
    assert torch.calls == []
    for callback in layer._at_first_use:
        callback(torch)
    assert [call["max_entries"] for call in torch.calls] == [500]


def test_the_history_begins_at_once_where_the_process_uses_cuda(torch: RecordingTorch) -> None:
    torch.cuda.is_initialized = lambda: True
    module.start_history("500")
    assert [call["max_entries"] for call in torch.calls] == [500]
    assert layer._at_first_use == [], "not a second time"


@pytest.mark.parametrize("value", ["0", "-1", "all", "1e5"])
def test_a_malformed_number_of_entries_is_reported(
    value: str, torch: RecordingTorch, caplog: pytest.LogCaptureFixture
) -> None:
    module.start_history(value)
    assert [record.getMessage() for record in caplog.records] == [
        f"TMS_MEMORY_HISTORY='{value}' is ignored: it may be a number of entries of at least 1"
    ]
    assert layer._at_first_use == []


def test_a_torch_that_cannot_record_does_not_fail_the_program(
    torch: RecordingTorch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.is_initialized = lambda: True
    torch.failure = RuntimeError("not with this allocator")
    module.start_history("500")
    assert "TMS_MEMORY_HISTORY has no effect: record_history: " in caplog.text
    assert "not with this allocator" in caplog.text


def test_snapshots_before_every_pause_or_some(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.is_initialized = lambda: True
    for folder, every, wanted in (("default", "", [1, 2, 3, 4, 5, 6, 7]), ("third", "3", [1, 2])):
        monkeypatch.setenv("TMS_SNAPSHOT_EVERY", every)
        monkeypatch.setattr(module, "before_pause", background.RegisteredWork())
        module.start_snapshots(str(tmp_path / folder))
        for _ in range(7):
            module.before_pause.run()
        assert moments(tmp_path / folder) == wanted


def test_snapshots_every_so_many_seconds(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, periodic: list[Recorded]
) -> None:
    torch.cuda.is_initialized = lambda: True
    monkeypatch.setenv("TMS_SNAPSHOT_EVERY", "0.5s")
    module.start_snapshots(str(tmp_path))
    module.before_pause.run()
    assert moments(tmp_path) == []
    (work,) = periodic
    assert work._seconds == 0.5
    assert [work._work(), work._work()] == [None, None]
    assert moments(tmp_path) == [1, 2]


def test_a_malformed_period_is_reported_and_each_pause_counts(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.is_initialized = lambda: True
    monkeypatch.setenv("TMS_SNAPSHOT_EVERY", "5m")
    module.start_snapshots(str(tmp_path))
    module.before_pause.run()
    assert moments(tmp_path) == [1]
    assert "TMS_SNAPSHOT_EVERY='5m' is ignored: it may be a number of pauses, such as 10, or of seconds" in caplog.text


def test_a_period_without_a_folder_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TMS_SNAPSHOT_DIR", "somewhere")
    module.check_every("10")
    assert caplog.text == ""
    monkeypatch.setenv("TMS_SNAPSHOT_DIR", " ")
    module.check_every("10")
    assert "TMS_SNAPSHOT_EVERY has no effect without TMS_SNAPSHOT_DIR" in caplog.text


def test_a_process_that_does_not_use_cuda_writes_nothing_and_is_not_made_to(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "require_module", lambda: pytest.fail("CUDA would be initialised"))
    module.start_snapshots(str(tmp_path))
    module.before_pause.run()
    monkeypatch.setattr(layer, "imported", lambda: None)
    module.before_pause.run()
    assert moments(tmp_path) == []


def test_a_failure_is_logged_once_with_the_folder_and_the_pause_goes_on(
    torch: RecordingTorch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.is_initialized = lambda: True
    (tmp_path / "file").write_text("")
    module.start_snapshots(str(tmp_path / "file" / "folder"))
    for _ in range(3):
        module.before_pause.run()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"no memory snapshot was written to {tmp_path}/file/folder: " in record.getMessage()


def test_the_variables_start_at_the_first_use_and_a_pause_survives_them(program: Any, tmp_path: Path) -> None:
    text = """
import sys, threading
import torch_memory_saver
assert threading.active_count() == 1
assert "torch_memory_saver.memory" not in sys.modules, "nothing at import"
saver = torch_memory_saver.torch_memory_saver
saver.pause()
assert threading.active_count() == 1
assert "torch_memory_saver.memory.recording_from_environment" in sys.modules
assert "torch" not in sys.modules
"""
    variables = {"TMS_MEMORY_HISTORY": "100", "TMS_SNAPSHOT_DIR": str(tmp_path), "TMS_SNAPSHOT_EVERY": "1"}
    assert program(text, preloaded=False, TMS_SNAPSHOT_ROLE="x", **variables).stderr == ""


def test_the_thread_of_seconds_ends_with_the_process_and_goes_on_in_forked_children(program: Any, tmp_path: Path) -> None:
    text = """
import os, threading
from types import SimpleNamespace
import torch_memory_saver
from torch_memory_saver.memory import recording_from_environment
event, seen = threading.Event(), []
def stand_in(self):
    seen.append(threading.current_thread().daemon)
    event.set()
recording_from_environment._Snapshots.write = stand_in
torch_memory_saver.torch_memory_saver.stats()
assert event.wait(60)
assert seen[0] is True
pid = os.fork()
if pid == 0:
    event.clear()
    os._exit(0 if event.wait(60) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    variables = {"TMS_SNAPSHOT_DIR": str(tmp_path), "TMS_SNAPSHOT_EVERY": "0.01s"}
    assert program(text, preloaded=False, **variables).stderr == ""
