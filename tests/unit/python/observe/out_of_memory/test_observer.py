"""Guards PyTorch's observer for out-of-memory reports: when it is attached, and that it is attached once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver._torch.binding import layer
from torch_memory_saver.observe._out_of_memory import reporter as module
from torch_memory_saver.observe._out_of_memory.reporter import Reporter


class ObservedTorch:
    """torch with what the observer needs. `queued`: what it calls when CUDA is initialised."""

    def __init__(self, initialized: bool) -> None:
        self.attached: list[Any] = []
        self.queued: list[Any] = []
        self.__version__ = "2.11.0"
        self._C: Any = SimpleNamespace(_cuda_attach_out_of_memory_observer=self.attached.append)
        self.cuda = SimpleNamespace(is_initialized=lambda: initialized, _lazy_call=self.queued.append)


@pytest.fixture
def mine(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """The reporter of a process that has attached no observer."""
    made = Reporter()
    monkeypatch.setattr(module, "reporter", made)
    monkeypatch.setattr(module, "_observed", [])
    monkeypatch.setattr(layer, "_at_first_use", [])
    return made


def test_the_observer_is_attached_once_where_cuda_is_in_use(
    mine: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ObservedTorch(initialized=True)
    monkeypatch.setattr(layer, "imported", lambda: torch)
    for _ in range(2):
        module.start_reports(str(tmp_path))
    assert torch.attached == [mine.observe]


def test_the_observer_is_attached_once_when_cuda_is_initialised(
    mine: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ObservedTorch(initialized=False)
    monkeypatch.setattr(layer, "imported", lambda: torch)
    module.start_reports(str(tmp_path))
    assert torch.attached == []
    for queued in torch.queued:
        queued()
    for callback in layer._at_first_use:
        callback(torch)
    assert torch.attached == [mine.observe]


def test_the_observer_is_attached_at_the_first_use_where_torch_is_imported_later(
    mine: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "imported", lambda: None)
    module.start_reports(str(tmp_path))
    torch = ObservedTorch(initialized=True)
    for callback in layer._at_first_use:
        callback(torch)
    assert torch.attached == [mine.observe]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("fails", [True, False])
def test_an_allocator_without_observers_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    def refuse(observer: object) -> None:
        raise RuntimeError("does not yet support attachOutOfMemoryObserver")

    torch = ObservedTorch(initialized=True)
    torch._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=refuse) if fails else SimpleNamespace()
    monkeypatch.setattr(layer, "imported", lambda: torch)
    module.start_reports(str(tmp_path))
    (record,) = caplog.records
    assert "PyTorch's own out-of-memory errors are not reported" in record.getMessage()


def test_the_variable_starts_it_at_the_first_use_and_not_before(program: Any, tmp_path: Path) -> None:
    text = """
import sys
import torch_memory_saver
name = "torch_memory_saver.observe._out_of_memory.content"
assert name not in sys.modules
torch_memory_saver.torch_memory_saver.pause()
assert name in sys.modules and "torch" not in sys.modules
from torch_memory_saver.observe._out_of_memory.reporter import reporter
assert reporter._folder is not None
"""
    program(text, preloaded=False, TMS_DEBUG="oom", TMS_DEBUG_DIR=str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    program(text.replace("name in sys", "name not in sys").replace("is not None", "is None"), preloaded=False)
