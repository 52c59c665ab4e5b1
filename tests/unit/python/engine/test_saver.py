"""Guards the singleton: its interface, its first use, the hook mode, its statistics, and another implementation in its
place."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeTorch
from processes import Program

import torch_memory_saver as module
from torch_memory_saver import _core, errors
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_the_module_has_the_singleton_and_its_methods() -> None:
    assert isinstance(module.torch_memory_saver, TorchMemorySaver)
    assert module.memory_saver is module.torch_memory_saver
    for name in ("region", "pause", "resume", "disable", "cuda_graph", "get_cpu_backup", "empty_cache", "stats"):
        assert getattr(module, name) == getattr(module.torch_memory_saver, name)
    assert all(hasattr(module, name) for name in module.__all__)
    assert module.torch_memory_saver.enabled is True


def test_import_changes_nothing(program: Program) -> None:
    text = """
import os, sys, threading
import torch_memory_saver
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert threading.active_count() == 1
maps = open("/proc/self/maps").read()
assert "_simulated_cuda" not in maps and "libcuda" not in maps
assert torch_memory_saver.torch_memory_saver._impl is None
assert len(os.listdir("/proc/self/task")) == 1
"""
    program(text, preloaded=False)


def test_torch_mode_without_torch_is_an_error(program: Program) -> None:
    text = """
import sys
sys.modules["torch"] = None  # What makes an import of it fail.
from torch_memory_saver import torch_memory_saver
from torch_memory_saver.errors import TorchUnavailableError, InvalidArgumentError
for action in (lambda: torch_memory_saver.region("a").__enter__(), lambda: torch_memory_saver.cuda_graph(None)):
    try:
        action()
    except TorchUnavailableError as error:
        assert "PyTorch" in str(error) and "preload" in str(error)
    else:
        raise AssertionError
assert torch_memory_saver.pause().allocations == 0
torch_memory_saver.empty_cache()

def capture():
    from torch_memory_saver.layer_graphs import capture_step

from torch_memory_saver.observe import memory
for action in (capture, memory.take_snapshot, memory.record_history):
    try:
        action()
    except TorchUnavailableError as error:
        assert "PyTorch" in str(error) and "preload" not in str(error), error
    else:
        raise AssertionError
"""
    program(text, preloaded=False)


def test_a_torch_without_its_cuda_libraries_is_an_error_that_names_simulate(program: Program, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    text = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from torch_memory_saver import torch_memory_saver
from torch_memory_saver.errors import TorchUnavailableError
try:
    torch_memory_saver.region("a").__enter__()
except TorchUnavailableError as error:
    assert "libcudnn.so.9" in str(error) and "torch_memory_saver simulate -- python" in str(error), error
else:
    raise AssertionError
"""
    program(text, preloaded=False)


def test_no_driver_is_a_named_error(program: Program) -> None:
    text = """
from torch_memory_saver import _core
from torch_memory_saver.errors import DriverUnavailableError
try:
    _core.allocate(1 << 21)
except DriverUnavailableError as error:
    assert "nonexistent.so" in str(error), error
else:
    raise AssertionError
"""
    program(text, preloaded=False, TMS_CUDA_DRIVER="/nonexistent.so")


def test_a_torch_that_has_not_used_cuda_is_left_alone(
    saver: TorchMemorySaver, simulator: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def initialize() -> None:
        raise AssertionError("CUDA was initialised")

    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False, init=initialize)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.11.0"))
    monkeypatch.setattr(layer, "_torch_cuda", None)
    for action in (saver.pause, saver.resume, saver.empty_cache, saver.stats):
        action()
    with pytest.raises(AssertionError):
        saver.region("a").__enter__()
    assert _core.region_current().depth == 0


# Hook mode


def test_hook_mode_before_the_first_use(saver: TorchMemorySaver) -> None:
    assert saver.hook_mode == "auto"
    for mode in ("preload", "torch", "auto"):
        saver.hook_mode = mode
        assert saver.hook_mode == mode
    assert saver._impl is None
    assert saver._impl_ctor_kwargs == {}


@pytest.mark.parametrize("mode", ["", "Torch", None, 3, "gms"])
def test_unknown_hook_modes_are_refused(saver: TorchMemorySaver, mode: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match='"auto", "preload" or "torch"'):
        saver.hook_mode = mode
    assert saver.hook_mode == "auto"


def test_hook_mode_after_the_first_use(saver: TorchMemorySaver, simulator: object) -> None:
    saver.stats()
    assert saver.hook_mode == "torch"
    saver.hook_mode = "torch"
    saver.hook_mode = "auto"
    with pytest.raises(errors.InvalidStateError, match="after the first use"):
        saver.hook_mode = "preload"
    assert saver.hook_mode == "torch"


def test_preload_mode_without_the_library_names_the_remedy(saver: TorchMemorySaver) -> None:
    saver.hook_mode = "preload"
    with pytest.raises(errors.InvalidStateError, match=r"configure_subprocess.*LD_PRELOAD=.*hook_mode_preload"):
        saver.pause()
    assert saver._impl is None
    saver.hook_mode = "auto"
    assert saver.pause().allocations == 0


def test_stats(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a", enable_cpu_backup=True):
        first = fake_torch.allocate(3 * MIB)
    with saver.region("b"):
        fake_torch.allocate(2 * MIB)
    saver.reset_peaks()
    saver.pause("a")
    stats = saver.stats()
    assert stats.tags["a"] == module.reports.Usage(1, 3 * MIB, 0, 4 * MIB, stats.tags["a"].backup_bytes, 0, 4 * MIB)
    assert stats.tags["a"].backup_bytes >= 3 * MIB
    assert stats.tags["b"] == module.reports.Usage(1, 2 * MIB, 2 * MIB, 0, 0, 0, 2 * MIB)
    assert (stats.total.allocations, stats.total.resident_bytes, stats.total.paused_bytes) == (2, 2 * MIB, 4 * MIB)
    row = stats.allocations[0]
    assert (row.address, row.state, row.backup, row.device, row.tag) == (first, "paused", "host", 0, "a")
    assert stats.counters["paused_bytes"] == 4 * MIB


def test_init_enable_without_the_library_is_one_warning(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "yes")
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        saver.pause()
        saver.resume()
    assert len(caplog.records) == 1
    assert "LD_PRELOAD" in caplog.text


def test_info_is_a_line_for_each_pause_and_resume(program: Program) -> None:
    text = """
with torch_memory_saver.region("a", enable_cpu_backup=True):
    address = cuda_malloc(2 * MIB)
torch_memory_saver.pause("a")
torch_memory_saver.resume()
"""
    lines = program(text, TMS_LOG_LEVEL="Info").stderr.splitlines()
    assert [re.sub(r"[0-9.]+ seconds", "T seconds", line.split(" info: ")[1]) for line in lines] == [
        "pause: 1 allocation, 2.0 MiB, in T seconds, 2.0 MiB of contents to host memory; "
        "now 0 bytes are resident and 2.0 MiB paused; by tag: 'a' 2.0 MiB",
        "resume: 1 allocation, 2.0 MiB, in T seconds, 2.0 MiB of contents from backups; "
        "now 2.0 MiB are resident and 0 bytes paused; by tag: 'a' 2.0 MiB",
    ]


# Another implementation in its place, as NVIDIA Dynamo does it


def test_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Theirs:
        @contextmanager
        def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
            calls.append((tag, enable_cpu_backup))
            yield

        def pause(self, tag: str | None = None) -> None:
            calls.append(("pause", tag))

        def resume(self, tag: str | None = None) -> None:
            calls.append(("resume", tag))

    def ensure_initialized(self: TorchMemorySaver) -> None:
        if self._impl is not None:
            return
        assert self._impl_ctor_kwargs.get("hook_mode") is None
        self._impl = Theirs()
        del self._impl_ctor_kwargs

    monkeypatch.setattr(TorchMemorySaver, "_ensure_initialized", ensure_initialized)
    saver = TorchMemorySaver()
    with saver.region("weights", enable_cpu_backup=True):
        pass
    saver.pause("weights")
    saver.resume()
    assert calls == [("weights", True), ("pause", "weights"), ("resume", None)]
    assert saver.hook_mode == "torch"


def test_a_backup_without_its_name_is_explained(saver: TorchMemorySaver) -> None:
    with pytest.raises(errors.InvalidArgumentError, match='pass the backup by name, as backup="host"'):
        saver.region("x", "host")  # type: ignore[arg-type]
