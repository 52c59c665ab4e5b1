"""Guards the settings of programs, as attributes and as environment variables: bad values are refused and misspelled names
are reported."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeTorch
from processes import Program

from torch_memory_saver import _core, errors
from torch_memory_saver._engine import variables
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[4]


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
    assert _core.region_current().depth == 0


@pytest.mark.parametrize("tags", [3, ["a", ""], b"a"])
def test_bad_tags_of_pause_and_resume(saver: TorchMemorySaver, tags: Any) -> None:
    for action in (saver.pause, saver.resume):
        with pytest.raises(errors.InvalidArgumentError):
            action(tags)


@pytest.mark.parametrize("value", [-1, "1", 1.0, None, 1 << 63])
def test_bad_margins(saver: TorchMemorySaver, simulator: object, value: Any) -> None:
    saver.memory_margin_bytes = 5 * MIB
    message = "2^63" if value in (-1, 1 << 63) else "must be an int of bytes, such as 1 << 30"
    with pytest.raises(errors.InvalidArgumentError, match=re.escape(message)):
        saver.memory_margin_bytes = value
    assert saver.memory_margin_bytes == 5 * MIB


def test_a_margin_is_kept_free(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    saver.memory_margin_bytes = _core.device_memory(0).free - 4 * MIB
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


def test_guard_mode_shows_its_byte(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert saver.guard is saver.stats().guard is False
    with saver.region("a"):
        address = fake_torch.allocate(4 * MIB)
    saver.guard = True
    assert saver.guard is saver.stats().guard is True
    saver.pause()
    assert ctypes.string_at(address, 4 * MIB) == bytes([_core.GUARD_BYTE]) * (4 * MIB)
    assert saver.stats().guarded_bytes == 4 * MIB
    saver.resume()
    assert ctypes.string_at(address, 4 * MIB) == b"\xff" * (4 * MIB)
    assert saver.stats().guarded_bytes == 0
    saver.pause()
    saver.resume(zero=True)
    assert ctypes.string_at(address, 4 * MIB) == bytes(4 * MIB)


@pytest.mark.parametrize("value", ["off", 1, None])
def test_guard_is_true_or_false(saver: TorchMemorySaver, value: Any) -> None:
    saver.guard = True
    with pytest.raises(errors.InvalidArgumentError, match="guard must be True or False"):
        saver.guard = value
    assert saver.guard is True


def test_the_environment_switches_guard_mode_on(program: Program) -> None:
    text = """
with torch_memory_saver.region("a"):
    address = cuda_malloc(2 * MIB)
assert torch_memory_saver.guard
torch_memory_saver.pause()
assert read(address, 4) == b"\\xff" * 4
torch_memory_saver.guard = False
torch_memory_saver.resume()
assert read(address, 4) != b"\\xff" * 4
"""
    program(text, TMS_GUARD="1")
    program(
        "from torch_memory_saver import torch_memory_saver as saver; assert saver.guard", preloaded=False, TMS_GUARD="yes"
    )


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
    path = tmp_path / "misspelled" / "backups"
    text = f"a backup could not be used: '{path}' has no parent directory .*: create its parent directories first"
    with pytest.raises(errors.BackupIOError, match=text) as caught:
        saver.set_disk_backup_dir(path)
    assert (caught.value.errno, caught.value.driver_call) == (errno.ENOENT, "mkdirat")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_disk_directory_that_cannot_be_written_to(saver: TorchMemorySaver, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(errors.BackupIOError):
        saver.set_disk_backup_dir(tmp_path)


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


def test_settings_of_existing_programs_can_be_set(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
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
from torch_memory_saver import torch_memory_saver, _core
from torch_memory_saver.errors import InvalidArgumentError
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
refused(lambda: _core.region_enter("a", _core.BACKUP_NONE, True))
refused(lambda: _core.region_enter("a", _core.BACKUP_NONE, True))
refused(lambda: _core.allocate(1 << 21))
assert _core.region_current().depth == 0
"""
    done = program(text, preloaded=preloaded, **{name: "16 GiB"})
    assert done.stderr == ""


def test_a_limit_of_nothing_is_one(program: Program) -> None:
    text = """
from torch_memory_saver.errors import OutOfHostMemoryError
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


def test_unknown_variables_are_reported_once_with_a_suggestion(program: Program) -> None:
    text = """
import torch_memory_saver as module
saver = module.torch_memory_saver
assert saver.hook_mode == "auto"
print("before the first use", file=__import__("sys").stderr)
saver.pause(), saver.resume(), module.TorchMemorySaver().pause()
"""
    misspelled = {"TMS_HOST_MEMORY_LIMIT": "5", "TMS_INIT_ENABEL": "1", "TMS_XYZZY": "1"}
    done = program(text, preloaded=False, **misspelled, **dict.fromkeys(variables.BUILD_VARIABLES, "1"))
    lines = done.stderr.splitlines()
    assert lines[0] == "before the first use"
    assert len(lines) == 4, done.stderr
    assert lines[1].endswith(
        "variable TMS_HOST_MEMORY_LIMIT has no effect: it is unknown; did you mean TMS_HOST_MEMORY_LIMIT_MB?"
    )
    assert lines[2].endswith("variable TMS_INIT_ENABEL has no effect: it is unknown; did you mean TMS_INIT_ENABLE?")
    assert lines[3].endswith("variable TMS_XYZZY has no effect: it is unknown")


def test_every_variable_that_is_read_is_known() -> None:
    assert variables.unknown_variables(_core.SETTINGS) == []
    assert variables.unknown_variables(["PATH", "tms_x"]) == []
    sources = [*(REPOSITORY / "csrc" / "simulator").rglob("*.c"), *(REPOSITORY / "tests").rglob("*.py")]
    sources.append(REPOSITORY / "torch_memory_saver" / "_cli" / "demo.py")
    read = {name for path in sources for name in re.findall(r'"(TMS_(?:SIMULATED|GPU|DEMO)_[A-Z_]+)"', path.read_text())}
    misspelled = {"TMS_GPU_SEEED", "TMS_DEMO_CHILDREN", "TMS_SIMULATED_DEVICE"}
    assert {"TMS_GPU_RECORD", "TMS_DEMO_CHILD"} <= read
    assert set(variables.unknown_variables(read | misspelled)) == misspelled


def test_a_process_that_only_inherits_variables_gets_no_warning(program: Program) -> None:
    text = """
address = cuda_malloc(2 * MIB)
fill(address, 2 * MIB, 7)
cuda_free(address)
"""
    done = program(text, TMS_HOST_MEMORY_LIMIT_MB="abc", TMS_INIT_ENABEL="1")
    assert done.stderr == ""
