"""Guards host buffers, errors and the GIL: references, exceptions and threads of Python in the extension module."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region
from processes import wait_until

from torch_memory_saver import _core, errors

MIB = 1 << 20
STUB = Path(_core.__file__).with_name("_core.pyi")
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh process that imports the same package."""
    environment = os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(STUB.parent.parent), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


# Names.


def test_state_names() -> None:
    numbers = {name: getattr(_core, name) for name in dir(_core) if name.startswith("STATE_") and name != "STATE_NAMES"}
    assert {f"STATE_{text.upper()}": number for number, text in enumerate(_core.STATE_NAMES)} == numbers


# Host buffers.


def test_host_buffer_outlives_its_allocation(simulator: Any) -> None:
    with core_region("weights", _core.BACKUP_PINNED, True):
        address = _core.allocate(MIB, 0)
    simulator.write(address, b"\x5a" * MIB)
    assert _core.host_backup(address, MIB) is None
    _core.pause(None, None)
    buffer = _core.host_backup(address + 4096, 8192)
    assert buffer is not None
    assert simulator.read(buffer.address, 8192) == b"\x5a" * 8192
    _core.free(address)
    assert simulator.usage(0).host_bytes >= MIB
    assert simulator.read(buffer.address, 8192) == b"\x5a" * 8192
    del buffer
    wait_until(lambda: simulator.usage(0).host_bytes == 0)


def test_host_buffers_are_made_by_host_backup_only(simulator: Any) -> None:
    with pytest.raises(TypeError, match="cannot create"):
        _core.HostBuffer()
    address = _core.allocate(MIB, 0)
    with pytest.raises(errors.InvalidArgumentError):
        _core.host_backup(address, 2 * MIB)
    with pytest.raises(errors.NotManagedError):
        _core.host_backup(4096, 1)


def test_host_buffer_s_type_is_freed_with_the_last_object(simulator: Any) -> None:
    with core_region("weights", _core.BACKUP_MMAP, True):
        address = _core.allocate(MIB, 0)
    _core.pause(None, None)
    before = sys.getrefcount(_core.HostBuffer)
    buffers = [_core.host_backup(address, MIB) for _ in range(10)]
    during = sys.getrefcount(_core.HostBuffer)
    del buffers
    after = sys.getrefcount(_core.HostBuffer)
    assert (during, after) == (before + 10, before)


# Errors.


def test_errors_carry_what_the_core_knows(simulator: Any) -> None:
    simulator.fail_after("cuMemCreate", 0, 100, OUT_OF_MEMORY)
    raised = pytest.raises(errors.OutOfMemoryError, match="cuMemCreate")
    with core_region("kv_cache", _core.BACKUP_NONE, True), raised as failure:
        _core.allocate(3 * MIB, 1)
    error = failure.value
    assert (error.operation, error.driver_call, error.error_name) == ("allocate", "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
    assert (error.driver_result, error.device, error.bytes, error.tag) == (OUT_OF_MEMORY, 1, 3 * MIB, "kv_cache")


def test_system_errors_carry_errno(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.BackupIOError) as failure:
        _core.set_disk_directory(str(tmp_path / "file" / "below"))
    assert failure.value.os_error == errno.ENOTDIR


def test_a_tag_cut_in_the_middle_of_a_character_is_still_text(simulator: Any) -> None:
    simulator.fail_after("cuMemCreate", 0, 100, OUT_OF_MEMORY)
    tag = "x" + "\u00e9" * 100  # two bytes a character: the error value's field ends inside one
    with core_region(tag, _core.BACKUP_NONE, True), pytest.raises(errors.OutOfMemoryError) as failure:
        _core.allocate(MIB, 0)
    assert failure.value.tag.startswith("x\u00e9\u00e9")


def test_failure_without_the_errors_module_is_a_runtime_error() -> None:
    program = """
import sys
from torch_memory_saver import _core
sys.modules["torch_memory_saver.errors"] = None
try:
    _core.device_memory(77)
except RuntimeError as error:
    assert type(error) is RuntimeError, type(error)
    assert "77" in str(error), error
    assert isinstance(error.__cause__, ImportError), error.__cause__
    print("raised")
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("raised\n", 0), done.stderr


def test_make_error_that_makes_no_exception_is_reported() -> None:
    program = """
from torch_memory_saver import _core, errors
errors.make_error = lambda *arguments: "no exception"
try:
    _core.device_memory(77)
except RuntimeError as error:
    assert "'no exception', not an exception" in str(error.__cause__), error.__cause__
    print("raised")
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("raised\n", 0), done.stderr


# The GIL.


def test_other_threads_run_python_while_pause_waits_for_the_device() -> None:
    # In a process of its own: a pause that keeps the GIL would block this one for ever.
    program = """
import ctypes, os, threading
from torch_memory_saver import _core
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
address = _core.allocate(1 << 20, 0)
context = ctypes.c_void_p()
assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert simulator.cuCtxPushCurrent_v2(context) == 0
assert simulator.tms_sim_launch_add(None, address, 1 << 20, 1, 1) == 0
thread = threading.Thread(target=_core.pause, args=(None, None))
thread.start()
simulator.tms_sim_wait_until_synchronizing()
print("running", _core.find(address).state == _core.STATE_PAUSING, flush=True)
simulator.tms_sim_open_gate(1)
thread.join()
print("paused", _core.find(address).state == _core.STATE_PAUSED)
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("running True\npaused True\n", 0), done.stderr
