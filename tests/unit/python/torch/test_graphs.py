"""Guards cuda_graph() against wrong arguments and a capture that fails to begin; the order of what it does before a capture;
and its warning about NCCL. The pools of captures are in tests/torch/test_graphs.py and tests/gpu/test_graph_tokens.py."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeGraph, FakeTorch

from torch_memory_saver import _core, errors
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_workspaces_are_made_before_the_capture_and_in_ordinary_memory(
    saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    with saver.region("weights"), saver.cuda_graph(FakeGraph(), tag="graphs"):
        assert fake_torch.workspaces == [([], 0)] * 2, "before torch synchronizes, and again when the capture begins"


def test_a_failed_begin_restores_everything(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("outer"):
        manager = saver.cuda_graph(FakeGraph(), stream=None)
        fake_torch.torch.cuda.graph = lambda *a, **k: FailingCapture(fake_torch)
        with pytest.raises(RuntimeError, match="cannot capture"):
            manager.__enter__()
        assert fake_torch.stream == "main stream"
        assert _core.region_current().tag == "outer"
        assert len(fake_torch.routings) == 1
    assert _core.counters()["visible_captures"] == 0


class FailingCapture:
    capture_stream = SimpleNamespace(device_index=0)

    def __init__(self, fake_torch: FakeTorch) -> None:
        self.fake_torch = fake_torch

    def __enter__(self) -> None:
        self.fake_torch.stream = "capture stream"
        raise RuntimeError("cannot capture")

    def __exit__(self, *exception: object) -> None:
        pytest.fail("it has not begun")


@pytest.mark.parametrize(
    "arguments",
    [
        {"cuda_graph": "graph"},
        {"pool": "token"},
        {"pool": (1, 2, 3)},
        {"capture_error_mode": "strict"},
        {"tag": ""},
        {"cpu_backup_backend": "mmap"},
        {"enable_cpu_backup": True, "cpu_backup_backend": "tape"},
    ],
)
def test_bad_arguments(saver: TorchMemorySaver, fake_torch: FakeTorch, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.cuda_graph(**({"cuda_graph": FakeGraph()} | arguments))


def with_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module = ModuleType("torch")
    module.distributed = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: backend, get_rank=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.parametrize(
    ("backend", "setting", "warnings"), [("nccl", None, 1), ("nccl", "0", 0), ("gloo", None, 0), ("nccl", "1", 1)]
)
def test_one_warning_about_nccl(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    setting: str | None,
    warnings: int,
) -> None:
    with_backend(monkeypatch, backend)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", setting)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        for _ in range(2):
            with saver.cuda_graph(FakeGraph()):
                pass
    assert len([record for record in caplog.records if "NCCL_GRAPH_REGISTER" in record.message]) == warnings


TOKEN = (7, 0)


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cudaMalloc is ours: its allocations are managed if a region's settings are in force."""
    monkeypatch.setattr(_core, "preloaded", True)


def test_settings_of_a_capture_end_before_it_does(saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None) -> None:
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def noting(*arguments: Any, **keywords: Any) -> Iterator[None]:
        seen.append((_core.region_current().tag, _core.region_current().managed))
        yield
        seen.append((_core.region_current().tag, _core.region_current().managed))

    def graph(*arguments: Any, **keywords: Any) -> Any:
        context: Any = noting(*arguments, **keywords)
        context.capture_stream = SimpleNamespace(device_index=0)
        return context

    fake_torch.torch.cuda.graph = graph
    with saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"):
        current = _core.region_current()
        assert (current.tag, current.backup, current.managed) == ("g", _core.BACKUP_NONE, True)
    assert seen == [("g", False), ("g", False)], "what torch itself allocates for all graphs is not managed"
