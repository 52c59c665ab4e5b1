"""The singleton: first use, hook mode, settings, bad input, and another implementation in its place."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Program
from fake_torch import FakeTorch

import torch_memory_saver as module
from torch_memory_saver import _core, errors, settings, torch_layer
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_module_has_the_singleton_and_its_methods() -> None:
    assert isinstance(module.torch_memory_saver, TorchMemorySaver)
    assert module.memory_saver is module.torch_memory_saver
    for name in ("region", "pause", "resume", "disable", "cuda_graph", "get_cpu_backup", "empty_cache", "stats"):
        assert getattr(module, name) == getattr(module.torch_memory_saver, name)
    assert all(hasattr(module, name) for name in module.__all__)
    assert module.torch_memory_saver.enabled is True


def test_the_version_is_the_projects() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert module.__version__ == version


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


def test_torch_mode_without_torch_says_so(program: Program) -> None:
    text = """
import sys
sys.modules["torch"] = None  # What makes an import of it fail.
from torch_memory_saver import torch_memory_saver, TorchUnavailableError, InvalidArgumentError
for action in (lambda: torch_memory_saver.region("a").__enter__(), lambda: torch_memory_saver.cuda_graph(None)):
    try:
        action()
    except TorchUnavailableError as error:
        assert "PyTorch" in str(error) and "preload" in str(error)
    else:
        raise AssertionError
assert torch_memory_saver.pause().allocations == 0
torch_memory_saver.empty_cache()
"""
    program(text, preloaded=False)


def test_no_driver_is_a_named_error(program: Program) -> None:
    text = """
from torch_memory_saver import _core, DriverUnavailableError
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
    monkeypatch.setattr(torch_layer, "_torch_cuda", None)
    for action in (saver.pause, saver.resume, saver.empty_cache, saver.stats):
        action()
    with pytest.raises(AssertionError):
        saver.region("a").__enter__()
    assert _core.region_current()[3] == 0


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


def test_preload_mode_without_the_library_says_how(saver: TorchMemorySaver) -> None:
    saver.hook_mode = "preload"
    with pytest.raises(errors.InvalidStateError, match=r"configure_subprocess.*LD_PRELOAD=.*hook_mode_preload"):
        saver.pause()
    assert saver._impl is None
    saver.hook_mode = "auto"
    assert saver.pause().allocations == 0


# Bad input


def test_bad_arguments_of_region(saver: TorchMemorySaver) -> None:
    bad: list[dict[str, Any]] = [
        {"tag": ""},
        {"tag": None},
        {"tag": 3},
        {"enable_cpu_backup": True, "enable_disk_backup": True},
        {"cpu_backup_backend": "mmap"},
        {"enable_cpu_backup": True, "cpu_backup_backend": "tape"},
    ]
    for arguments in bad:
        with pytest.raises(errors.InvalidArgumentError):
            saver.region(**arguments)
    assert _core.region_current()[3] == 0


@pytest.mark.parametrize("tags", [3, ["a", ""], b"a"])
def test_bad_tags_of_pause_and_resume(saver: TorchMemorySaver, tags: Any) -> None:
    for action in (saver.pause, saver.resume):
        with pytest.raises(errors.InvalidArgumentError):
            action(tags)


@pytest.mark.parametrize("value", [-1, "1", 1.0, None, 1 << 63])
def test_bad_margins(saver: TorchMemorySaver, simulator: object, value: Any) -> None:
    saver.memory_margin_bytes = 5 * MIB
    with pytest.raises(errors.InvalidArgumentError):
        saver.memory_margin_bytes = value
    assert saver.memory_margin_bytes == 5 * MIB


def test_a_margin_is_kept_free(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    free, _ = _core.device_memory(0)
    saver.memory_margin_bytes = free - 4 * MIB
    with saver.region("a"):
        fake_torch.allocate(4 * MIB)
        with pytest.raises(errors.OutOfMemoryError, match="a") as caught:
            fake_torch.allocate(2 * MIB)
    assert (caught.value.device, caught.value.bytes) == (0, 2 * MIB)


def test_retention_is_read_at_resume(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert saver.retain_cpu_backup is False
    with saver.region("a", enable_cpu_backup=True):
        address = fake_torch.allocate(2 * MIB)
    saver.pause()
    saver.retain_cpu_backup = True
    saver.resume()
    assert saver.stats().tags["a"].backup_bytes == 2 * MIB
    assert _core.host_backup(address, 2 * MIB) is not None
    saver.pause()
    saver.retain_cpu_backup = False
    saver.resume()
    assert saver.stats().tags["a"].backup_bytes == 0


def test_the_disk_directory_is_made(saver: TorchMemorySaver, fake_torch: FakeTorch, tmp_path: Path) -> None:
    directory = tmp_path / "not yet"
    saver.set_disk_backup_dir(directory)
    with saver.region("a", enable_disk_backup=True):
        fake_torch.allocate(2 * MIB)
    assert saver.pause().copied_bytes == 2 * MIB
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = [path for path in directory.iterdir() if path.suffix == ".backup"]
    assert [path.stat().st_size >= 2 * MIB for path in files] == [True]
    assert saver.resume().copied_bytes == 2 * MIB


@pytest.mark.parametrize("path", ["", None, 3, b"bytes", "nul\0"])
def test_bad_disk_directories(saver: TorchMemorySaver, path: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.set_disk_backup_dir(path)


def test_a_disk_directory_that_cannot_be_made(saver: TorchMemorySaver, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.BackupIOError, match="file") as caught:
        saver.set_disk_backup_dir(tmp_path / "file" / "directory")
    assert caught.value.errno == caught.value.os_error != 0


def test_a_disk_directory_without_its_parent_is_not_made(saver: TorchMemorySaver, tmp_path: Path) -> None:
    with pytest.raises(errors.BackupIOError, match="create the directories above it first") as caught:
        saver.set_disk_backup_dir(tmp_path / "misspelled" / "backups")
    assert caught.value.errno == errno.ENOENT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_disk_directory_that_cannot_be_written_to(saver: TorchMemorySaver, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(errors.BackupIOError):
        saver.set_disk_backup_dir(tmp_path)


def test_stats(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a", enable_cpu_backup=True):
        first = fake_torch.allocate(3 * MIB)
    with saver.region("b"):
        fake_torch.allocate(2 * MIB)
    saver.pause("a")
    stats = saver.stats()
    assert stats.tags["a"] == module.TagUsage(1, 3 * MIB, 0, 4 * MIB, stats.tags["a"].backup_bytes)
    assert stats.tags["a"].backup_bytes >= 3 * MIB
    assert stats.tags["b"] == module.TagUsage(1, 2 * MIB, 2 * MIB, 0, 0)
    assert (stats.total.allocations, stats.total.resident_bytes, stats.total.paused_bytes) == (2, 2 * MIB, 4 * MIB)
    row = stats.allocations[0]
    assert (row.address, row.state, row.backup, row.device, row.tag) == (first, "paused", "pinned", 0, "a")
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


# Misspelled settings


def test_an_unknown_attribute_is_refused_with_a_suggestion(saver: TorchMemorySaver) -> None:
    for name, meant in (
        ("retain_cpu_backups", "retain_cpu_backup"),
        ("hookmode", "hook_mode"),
        ("host_memry", "host_memory"),
        ("memory_margin_byte", "memory_margin_bytes"),
    ):
        with pytest.raises(AttributeError, match=f"no setting '{name}'; did you mean {meant}\\?"):
            setattr(saver, name, True)
        assert not hasattr(saver, name)
    with pytest.raises(AttributeError, match=r"no setting 'colour'$"):
        saver.colour = "red"  # type: ignore[attr-defined]
    assert saver._impl is None


def test_what_programs_in_the_field_set_can_be_set(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = SimpleNamespace(hook_mode="other", retain_cpu_backup=False)
    saver._impl = implementation
    saver._impl_ctor_kwargs = {}
    saver._private_to_them = 1  # type: ignore[attr-defined]
    monkeypatch.setattr(saver, "pause", lambda tag=None: "replaced")
    saver.retain_cpu_backup = True
    assert saver.pause() == "replaced"  # type: ignore[comparison-overlap]
    assert implementation.retain_cpu_backup is True


@pytest.mark.parametrize("preloaded", [False, True])
@pytest.mark.parametrize("name", ["TMS_HOST_MEMORY_LIMIT_MB", "TMS_HOST_POOL_LIMIT_MB"])
def test_a_malformed_limit_is_an_error_at_the_first_use(program: Program, name: str, preloaded: bool) -> None:
    text = f"""
from torch_memory_saver import torch_memory_saver, _core, InvalidArgumentError
def refused(action):
    try:
        action()
    except InvalidArgumentError as error:
        for part in ("{name}='16 GiB'", "whole number from 0 to 2^40"):
            assert part in str(error), error
    else:
        raise AssertionError(action)
for action in (torch_memory_saver.pause, torch_memory_saver.resume, lambda: torch_memory_saver.reserve_host_memory(1 << 20)):
    refused(action)
refused(lambda: _core.region_push("a", _core.BACKUP_NONE, True))
refused(lambda: _core.region_enter("a", _core.BACKUP_NONE, True))
refused(lambda: _core.allocate(1 << 21))
assert _core.region_current()[3] == 0
"""
    done = program(text, preloaded=preloaded, **{name: "16 GiB"})
    assert done.stderr == ""


def test_a_limit_of_nothing_is_one(program: Program) -> None:
    text = """
from torch_memory_saver import OutOfHostMemoryError
with torch_memory_saver.region("a", enable_cpu_backup=True):
    address = cuda_malloc(2 * MIB)
fill(address, 2 * MIB, 7)
try:
    torch_memory_saver.pause()
except OutOfHostMemoryError as error:
    assert "TMS_HOST_MEMORY_LIMIT_MB" in str(error), error
else:
    raise AssertionError
assert read(address, 4) == bytes([7] * 4)
assert torch_memory_saver.pause(backup="discard").allocations == 1
"""
    program(text, TMS_HOST_MEMORY_LIMIT_MB="0")


def test_a_pool_of_nothing_keeps_nothing(program: Program) -> None:
    text = """
import time
torch_memory_saver.host_memory = "pool"
with torch_memory_saver.region("a", enable_cpu_backup=True):
    address = cuda_malloc(2 * MIB)
torch_memory_saver.pause()
torch_memory_saver.resume()
end = time.monotonic() + 60
while torch_memory_saver.stats().host_resident_bytes:
    assert time.monotonic() < end
assert torch_memory_saver.stats().host_pooled_bytes == 0
"""
    program(text, TMS_HOST_POOL_LIMIT_MB="0")


def test_unknown_variables_are_said_once_with_a_suggestion(program: Program) -> None:
    text = """
import torch_memory_saver as module
saver = module.torch_memory_saver
assert saver.hook_mode == "auto"
print("before the first use", file=__import__("sys").stderr)
saver.pause(), saver.resume(), module.TorchMemorySaver().pause()
"""
    variables = {"TMS_HOST_MEMORY_LIMIT": "5", "TMS_INIT_ENABEL": "1", "TMS_XYZZY": "1", "TMS_WERROR": "1"}
    done = program(text, preloaded=False, **variables)
    lines = done.stderr.splitlines()
    assert lines[0] == "before the first use"
    assert len(lines) == 4, done.stderr
    assert lines[1].endswith(
        "variable TMS_HOST_MEMORY_LIMIT has no effect: it is unknown; did you mean TMS_HOST_MEMORY_LIMIT_MB?"
    )
    assert lines[2].endswith("variable TMS_INIT_ENABEL has no effect: it is unknown; did you mean TMS_INIT_ENABLE?")
    assert lines[3].endswith("variable TMS_XYZZY has no effect: it is unknown")


def test_every_variable_that_is_documented_or_read_is_known() -> None:
    table = re.search(r"## Environment\n(.*?)\n## ", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert table is not None
    documented = {
        name for row in re.findall(r"^\| (`TMS_.*?) \|", table.group(1), re.M) for name in re.findall(r"TMS_\w+", row)
    }
    assert documented == set(_core.SETTINGS)
    mentioned = re.findall(r"\bTMS_[A-Z_]+[A-Z]\b", (REPOSITORY / "README.md").read_text())
    assert settings.unknown_variables(mentioned) == []
    assert settings.unknown_variables(["TMS_SIMULATED_DEVICES", "TMS_GPU_SEED", "PATH", "tms_x"]) == []


def test_a_process_that_only_inherits_variables_hears_nothing(program: Program) -> None:
    text = """
address = cuda_malloc(2 * MIB)
fill(address, 2 * MIB, 7)
cuda_free(address)
"""
    done = program(text, TMS_HOST_MEMORY_LIMIT_MB="abc", TMS_INIT_ENABEL="1")
    assert done.stderr == ""


def test_info_is_a_line_for_each_pause_and_resume(program: Program) -> None:
    text = """
with torch_memory_saver.region("a", enable_cpu_backup=True):
    address = cuda_malloc(2 * MIB)
torch_memory_saver.pause("a")
torch_memory_saver.resume()
"""
    lines = program(text, TMS_LOG_LEVEL="Info").stderr.splitlines()
    assert [re.sub(r"[0-9.]+ seconds", "T seconds", line.split(" info: ")[1]) for line in lines] == [
        "pause: 1 allocation, 2097152 bytes (2.0 MiB), in T seconds, 2097152 bytes (2.0 MiB) of contents to host memory; "
        "now 0 bytes are resident and 2097152 bytes (2.0 MiB) paused; by tag: 'a' 2097152 bytes (2.0 MiB)",
        "resume: 1 allocation, 2097152 bytes (2.0 MiB), in T seconds, 2097152 bytes (2.0 MiB) of contents from backups; "
        "now 2097152 bytes (2.0 MiB) are resident and 0 bytes paused; by tag: 'a' 2097152 bytes (2.0 MiB)",
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
