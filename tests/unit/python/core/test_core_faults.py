"""Guards the exceptions of Python for faults of files, addresses and drivers: their type, the cause that the message names,
and that nothing has changed. Only this level starts programs, with libraries that are no usable driver and under limits of
the system. The C tests core/test_saver_faults.c and backup/disk/test_tampering.c check states and files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_torch import FakeTorch
from processes import Program

from torch_memory_saver import _core, errors
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
#: Size of a block of a backup file; each block has its own checksum.
BLOCK = 512 << 10
SIZE = 3 * MIB
ACTIVE, PAUSED = _core.STATE_ACTIVE, _core.STATE_PAUSED


class Disk:
    """One tensor with a disk backup in a directory of its own."""

    def __init__(self, saver: TorchMemorySaver, fake: FakeTorch, simulator: Any, directory: Path) -> None:
        self.saver, self.simulator, self.directory = saver, simulator, directory
        saver.set_disk_backup_dir(directory)
        with saver.region("disk", enable_disk_backup=True):
            self.address = fake.allocate(SIZE)
        self.contents = bytes(range(251)) * (SIZE // 251) + b"end"[: SIZE % 251]
        self.contents = self.contents.ljust(SIZE, b"x")
        simulator.write(self.address, self.contents)

    @property
    def file(self) -> Path:
        (file,) = self.directory.glob("*.backup")
        return file

    @property
    def state(self) -> int:
        segment = _core.find(self.address)
        assert segment is not None
        return segment.state

    def resume_is_refused(self, text: str) -> errors.BackupIOError:
        before = self.simulator.usage(0).physical_bytes
        with pytest.raises(errors.BackupIOError, match=text) as caught:
            self.saver.resume()
        assert (caught.value.operation, caught.value.tag, caught.value.device) == ("resume", "disk", 0)
        assert self.state == PAUSED
        assert self.simulator.usage(0).physical_bytes == before
        return caught.value

    def resumes(self) -> None:
        self.saver.resume()
        assert self.state == ACTIVE
        assert self.simulator.read(self.address, SIZE) == self.contents


@pytest.fixture
def disk(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, tmp_path: Path) -> Disk:
    return Disk(saver, fake_torch, simulator, tmp_path / "backups")


def test_a_changed_backup_is_not_restored(disk: Disk) -> None:
    disk.saver.pause()
    with disk.file.open("r+b") as stream:
        stream.seek(BLOCK + 5)
        byte = stream.read(1)
        stream.seek(BLOCK + 5)
        stream.write(bytes([byte[0] ^ 1]))
    disk.simulator.clear_counts()
    error = disk.resume_is_refused("was changed or truncated")
    assert str(disk.file) in str(error)
    assert error.errno is None
    assert disk.simulator.calls("cuMemcpyHtoDAsync") == 1, "the block before it"
    with disk.file.open("r+b") as stream:
        stream.seek(BLOCK + 5)
        stream.write(byte)
    disk.resumes()


def test_a_truncated_backup_is_not_restored(disk: Disk, tmp_path: Path) -> None:
    disk.saver.pause()
    shutil.copyfile(disk.file, tmp_path / "copy")
    os.truncate(disk.file, SIZE - 1)
    disk.resume_is_refused("was changed or truncated")
    shutil.copyfile(tmp_path / "copy", disk.file)
    disk.resumes()


def test_a_removed_directory(disk: Disk, tmp_path: Path) -> None:
    disk.saver.pause()
    file = disk.file
    file.rename(tmp_path / "moved")
    assert disk.resume_is_refused("openat failed").errno == errno.ENOENT
    (tmp_path / "moved").rename(file)
    disk.resumes()
    shutil.rmtree(disk.directory)
    disk.saver.pause()
    assert disk.file.stat().st_mode & 0o777 == 0o600
    assert disk.directory.stat().st_mode & 0o777 == 0o700
    disk.resumes()


def test_another_process_s_files_stay(disk: Disk, tmp_path: Path) -> None:
    disk.saver.pause()
    disk.resumes()
    ours = disk.file
    ours.rename(tmp_path / "moved")
    ours.write_bytes(b"precious")
    (disk.directory / "tms-1-0123456789abcdef-1.backup").write_bytes(b"precious")
    disk.saver.pause()
    assert ours.read_bytes() == b"precious"
    disk.saver.resume()
    assert disk.simulator.read(disk.address, SIZE) == disk.contents
    _core.free(disk.address)
    assert sorted(path.read_bytes() for path in disk.directory.glob("*.backup")) == [b"precious"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_user_s_link_is_not_followed(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "victim")
    os.lchown(link, 12345, 12345)
    with pytest.raises(errors.BackupIOError, match="symbolic link of another user") as caught:
        disk.saver.set_disk_backup_dir(link)
    assert caught.value.errno == errno.EPERM
    assert list((tmp_path / "victim").iterdir()) == []
    os.lchown(link, os.geteuid(), os.getegid())
    disk.saver.set_disk_backup_dir(link)
    disk.saver.pause()
    assert len(list((tmp_path / "victim").glob("*.backup"))) == 1
    disk.resumes()


def test_a_file_size_limit(disk: Disk) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, usual[1]))
    try:
        with pytest.raises(errors.BackupIOError) as caught:
            disk.saver.pause()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert caught.value.errno == errno.EFBIG
    assert disk.state == ACTIVE
    assert list(disk.directory.iterdir()) == []
    assert disk.simulator.read(disk.address, SIZE) == disk.contents
    disk.saver.pause()
    disk.resumes()


def test_a_file_size_limit_does_not_kill_a_program(program: Program, tmp_path: Path) -> None:
    """SIGXFSZ ends processes that do not ignore it. Python ignores it, and most programs do not."""
    text = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
with torch_memory_saver.region("a", enable_disk_backup=True):
    address = cuda_malloc(2 * MIB)
fill(address, 2 * MIB, 7)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
try:
    torch_memory_saver.pause()
except module.errors.BackupIOError as error:
    assert "27" in str(error), error
else:
    raise AssertionError
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
torch_memory_saver.pause()
torch_memory_saver.resume()
assert read(address, 2 * MIB) == bytes([7]) * (2 * MIB)
"""
    program(text, TMS_DISK_BACKUP_DIR=str(tmp_path))


def test_addresses_that_are_not_ours(program: Program) -> None:
    """Through all three entry points: the interposed cudaFree, torch's pluggable allocator, and the core."""
    text = """
library = ctypes.CDLL(_core.__file__)
library.tms_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.tms_torch_free.restype = None
def real_free(address):
    return runtime.cudaFree(ctypes.c_void_p(address))
with torch_memory_saver.region("a", enable_cpu_backup=True):
    kept, gone = cuda_malloc(2 * MIB), cuda_malloc(2 * MIB)
fill(kept, 2 * MIB, 9)
assert real_free(gone) == 0
local = ctypes.create_string_buffer(64)
for paused in (False, True):
    before = _core.counters()
    for address in (gone, ctypes.addressof(local), 1, 2 ** 64 - 1, kept - 1, kept + 1, kept + 2 * MIB - 1):
        assert real_free(address) != 0, hex(address)
        library.tms_torch_free(address, 2 * MIB, 0, None)
    assert not _core.free(gone) and not _core.free(ctypes.addressof(local))
    try:
        _core.free(kept + 512)
    except module.errors.InvalidArgumentError as error:
        assert "lies inside an allocation" in str(error)
    else:
        raise AssertionError
    after = _core.counters()
    assert after["frees_total"] == before["frees_total"] == 1
    assert len(_core.segments()) == 1
    if not paused:
        torch_memory_saver.pause()
torch_memory_saver.resume()
assert read(kept, 2 * MIB) == bytes([9]) * (2 * MIB)
assert real_free(kept) == 0 and real_free(kept) != 0
"""
    program(text)


#: A minimal driver; options remove functions or make them fail.
DRIVER_SOURCE = """
#include <stddef.h>
int cuInit(unsigned flags) { return INIT; }
int cuGetErrorName(int result, const char **name) {
    *name = result == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return *name ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)1 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = GRANULARITY; return 0; }
#ifdef VMM
int cuMemCreate(void) { return 801; }
#endif
int cuMemAddressReserve(void) { return 801; }
int cuMemAddressFree(void) { return 801; }
int cuMemRelease(void) { return 801; }
int cuMemMap(void) { return 801; }
int cuMemUnmap(void) { return 801; }
int cuMemSetAccess(void) { return 801; }
"""

ALLOCATION = """
import sys
from torch_memory_saver import _core, errors
for attempt in range(2):
    try:
        _core.allocate(1 << 20, 0)
    except errors.TorchMemorySaverError as error:
        print(type(error).__name__, error)
    else:
        raise AssertionError
assert _core.segments() == [] and _core.counters()["allocations_total"] == 0
"""


def compile_driver(folder: Path, **options: str) -> Path:
    """A library with these macros."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a driver with")
    macros = {"INIT": "0", "COUNT": "1", "GRANULARITY": "2097152", "VMM": "1"} | options
    (folder / "driver.c").write_text(DRIVER_SOURCE)
    arguments = [f"-D{name}={value}" for name, value in macros.items() if value]
    subprocess.run(
        [*compiler.split(), "-w", "-shared", "-fPIC", *arguments, "-o", str(folder / "driver.so"), str(folder / "driver.c")],
        check=True,
        timeout=60,
    )
    return folder / "driver.so"


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ({"INIT": "803"}, "DriverUnavailableError", "cuInit of '.*' failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        ({"INIT": "-5"}, "DriverUnavailableError", "failed with an unnamed error (-5)"),
        ({"VMM": ""}, "DriverUnavailableError", "is too old for virtual memory management and has no cuMemCreate"),
        ({"COUNT": "0"}, "DriverUnavailableError", "sees no device"),
        ({"COUNT": "-1"}, "DriverUnavailableError", "sees no device"),
        ({"GRANULARITY": "0"}, "DriverError", "cuMemGetAllocationGranularity returned 0 bytes"),
        ({"GRANULARITY": "3000000"}, "DriverError", "cuMemGetAllocationGranularity returned 3000000 bytes"),
        ({"GRANULARITY": "64"}, "DriverError", "cuMemGetAllocationGranularity returned 64 bytes"),
        ({"GRANULARITY": "((size_t)1<<62)"}, "DriverError", "cuMemGetAllocationGranularity returned 4611686018427387904"),
        ({}, "DriverError", "cuMemAddressReserve failed with an unnamed error (801)"),
    ],
    ids=lambda value: "-".join(value) + "=" + "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_unusable_drivers(program: Program, tmp_path: Path, options: dict[str, str], name: str, text: str) -> None:
    driver = compile_driver(tmp_path, **options)
    done = program(ALLOCATION, preloaded=False, TMS_CUDA_DRIVER=str(driver))
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith(f"{name} allocate: ")
    for part in text.split(".*"):
        assert part in lines[0]


@pytest.mark.parametrize("kind", ["text", "directory", "missing", "fifo", "truncated", "other library"])
def test_files_that_are_no_driver(program: Program, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "driver.so"
    if kind == "text":
        path.write_text("not a driver\n")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "truncated":
        path.write_bytes(compile_driver(tmp_path).read_bytes()[:600])
    named = "libm.so.6" if kind == "other library" else str(path)
    done = program(ALLOCATION, preloaded=False, TMS_CUDA_DRIVER=named)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith("DriverUnavailableError allocate: ")
    assert named in lines[0] and "TMS_CUDA_DRIVER" in lines[0]
