"""Guards what TMS_DEBUG starts for memory, history and snapshots: when they start, and what they never disturb."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from recording_torch import RecordingTorch

from torch_memory_saver import _core
from torch_memory_saver._engine import background
from torch_memory_saver._torch.binding import history, layer
from torch_memory_saver.observe.memory import sampler as module
from torch_memory_saver.observe.memory.sampler import moment_folder, moments
from torch_memory_saver.observe.memory.snapshot_reader import load_snapshot


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
    monkeypatch.delenv("RANK", raising=False)
    return fake


def test_the_history_begins_when_the_package_uses_cuda_and_not_before(torch: RecordingTorch) -> None:
    module.start_history("")
    assert torch.calls == []
    for callback in layer._at_first_use:
        callback(torch)
    assert [call["max_entries"] for call in torch.calls] == [history.DEFAULT_MAX_ENTRIES]


def test_the_history_begins_at_once_where_the_process_uses_cuda(torch: RecordingTorch) -> None:
    torch.cuda.is_initialized = lambda: True
    module.start_history("")
    assert [call["max_entries"] for call in torch.calls] == [history.DEFAULT_MAX_ENTRIES]
    assert layer._at_first_use == [], "not a second time"


def test_a_torch_that_cannot_record_does_not_fail_the_program(
    torch: RecordingTorch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.is_initialized = lambda: True
    torch.failure = RuntimeError("not with this allocator")
    module.start_history("")
    assert "TMS_DEBUG=history has no effect: record_history: " in caplog.text
    assert "not with this allocator" in caplog.text


def test_snapshots_before_every_pause(torch: RecordingTorch, tmp_path: Path) -> None:
    torch.cuda.is_initialized = lambda: True
    module.start_snapshots(str(tmp_path))
    for _ in range(3):
        module.before_pause.run()
    assert moments(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(("uses_cuda", "pauses", "lines"), [(True, 0, 1), (True, 1, 0), (False, 0, 0)])
def test_a_process_that_never_pauses_says_at_its_exit_that_nothing_was_recorded(
    uses_cuda: bool,
    pauses: int,
    lines: int,
    torch: RecordingTorch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.cuda.is_initialized = lambda: uses_cuda
    at_exit: list[Any] = []
    monkeypatch.setattr(module.atexit, "register", at_exit.append)
    module.start_snapshots(str(tmp_path))
    for _ in range(pauses):
        module.before_pause.run()
    (function,) = at_exit
    function()
    expected = f"nothing was recorded in {tmp_path}, because this process never paused memory"
    assert [expected in record.getMessage() for record in caplog.records] == [True] * lines


def test_a_snapshot_says_before_which_pause_it_was_taken(torch: RecordingTorch, tmp_path: Path) -> None:
    torch.cuda.is_initialized = lambda: True
    module.start_snapshots(str(tmp_path))
    for tags in (("kv_cache",), ("weights", "optimizer"), None):
        module.before_pause.run(tags)
    files = [next(moment_folder(tmp_path, moment).iterdir()) for moment in moments(tmp_path)]
    assert [load_snapshot(path).pausing for path in files] == [("kv_cache",), ("optimizer", "weights"), ()]


@pytest.mark.parametrize(("pauses", "kept"), [(1, 20), (2, 20), (3, 30), (5, 50), (7, 50)])
def test_the_latest_steps_are_kept_whatever_the_number_of_their_pauses(
    pauses: int, kept: int, torch: RecordingTorch, tmp_path: Path
) -> None:
    sampler = module.PauseSampler(str(tmp_path))
    for moment in range(60):
        sampler.sample_before_pause((f"tag {moment % pauses}",))
    assert moments(tmp_path) == list(range(60 - kept + 1, 61))


def test_a_process_with_few_pauses_leaves_the_steps_of_another_one(torch: RecordingTorch, tmp_path: Path) -> None:
    engine, trainer = module.PauseSampler(str(tmp_path)), module.PauseSampler(str(tmp_path))
    for _ in range(30):
        for tag in ("kv_cache", "draft", "weights"):
            engine.sample_before_pause((tag,))
        trainer.sample_before_pause(None)
    assert moments(tmp_path) == list(range(61, 91))


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


def test_they_start_at_the_first_use_and_a_pause_survives_them(program: Any, tmp_path: Path) -> None:
    text = """
import sys, threading
import torch_memory_saver
assert threading.active_count() == 1
assert "torch_memory_saver.observe.memory" not in sys.modules, "nothing at import"
saver = torch_memory_saver.torch_memory_saver
saver.pause()
assert threading.active_count() == 1
assert "torch_memory_saver.observe.memory.sampler" in sys.modules
assert "torch" not in sys.modules
"""
    variables = {"TMS_DEBUG": "history,snapshots", "TMS_DEBUG_DIR": str(tmp_path)}
    assert program(text, preloaded=False, **variables).stderr == ""
