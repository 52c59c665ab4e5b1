"""Guards bugs that the random operations of tests/model have found, each in the few steps that reveal it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Program = Callable[..., Any]

PRELUDE = """
import ctypes, os
from torch_memory_saver import _core, errors, torch_memory_saver as saver
MIB = 1 << 20
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_fail_after.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
simulator.tms_sim_take_memory.argtypes = (ctypes.c_int, ctypes.c_int64)

def allocate(device, tag, size=2 * MIB):
    level = _core.region_enter(tag, _core.BACKUP_PINNED, True)
    address = _core.allocate(size, device)
    _core.region_leave(level)
    return address

def fails(call, name, code=304, succeed=0):
    simulator.tms_sim_fail_after(name, succeed, 1000, code)
    try:
        call()
    except errors.TorchMemorySaverError as error:
        return error
    finally:
        simulator.tms_sim_fail_after(name, 0, 0, 0)
    raise AssertionError("it did not fail")

def state(address):
    return _core.find(address).state

def current_context():
    context = ctypes.c_void_p()
    assert simulator.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
"""


def test_exclusive_resume_of_damaged_memory_on_another_device(program: Program, tmp_path: Path) -> None:
    program(
        PRELUDE
        + """
first, second = allocate(0, "first"), allocate(1, "second")
saver.pause("first")
fails(lambda: saver.pause("second"), b"cuMemUnmap")
assert (state(first), state(second)) == (_core.STATE_PAUSED, _core.STATE_DAMAGED)
assert saver.resume(exclusive=True).allocations == 2
assert (state(first), state(second)) == (_core.STATE_ACTIVE, _core.STATE_ACTIVE)
""",
        preloaded=False,
        TMS_SIMULATED_DEVICES="2",
        TMS_LOCK_DIR=str(tmp_path),
    )


def test_resume_that_waits_does_not_skip_what_it_has_damaged(program: Program) -> None:
    """The first attempt lacks memory and cannot be undone: a second would find nothing that is paused, and succeed."""
    program(
        PRELUDE
        + """
address = allocate(0, "a")
saver.pause()
simulator.tms_sim_fail_after(b"cuMemSetAccess", 0, 1, 2)
error = fails(lambda: saver.resume(timeout=60), b"cuMemUnmap")
assert isinstance(error, errors.OutOfMemoryError), error
assert state(address) == _core.STATE_DAMAGED
assert saver.resume().allocations == 1
""",
        preloaded=False,
        TMS_LOG_LEVEL="silent",
    )


def test_resume_fails_if_memory_stays_damaged(program: Program) -> None:
    """It resumes the rest; its caller must not take all of it for resident."""
    program(
        PRELUDE
        + """
damaged, whole = allocate(0, "damaged"), allocate(0, "whole")
saver.pause("whole")
fails(lambda: saver.pause("damaged"), b"cuMemUnmap")
error = fails(saver.resume, b"cuMemUnmap")
assert isinstance(error, errors.DriverError), error
assert (error.operation, error.driver_call, error.driver_result) == ("resume", "cuMemUnmap", 304)
assert "1 allocation (2.0 MiB) with the tag 'damaged' is still damaged" in str(error), error
assert "Call resume() again" in str(error)
assert (state(damaged), state(whole)) == (_core.STATE_DAMAGED, _core.STATE_ACTIVE)
simulator.tms_sim_fail_after(b"cuMemUnmap", 0, 1, 304)
assert saver.pause().allocations == 1
assert (state(damaged), state(whole)) == (_core.STATE_DAMAGED, _core.STATE_PAUSED)
assert saver.stats().tags["damaged"].resident_bytes == 0
assert saver.stats().counters["resident_bytes"] == 2 * MIB
assert saver.resume().allocations == 2
""",
        preloaded=False,
        TMS_LOG_LEVEL="silent",
    )


def test_contexts_of_two_devices_that_could_not_be_left(program: Program) -> None:
    """However many calls failed, and on whichever device: the thread's context is restored afterwards."""
    program(
        PRELUDE
        + """
first, second = allocate(0, "a"), allocate(1, "a")
assert current_context() is None
for _ in range(20):
    simulator.tms_sim_fail_after(b"cuCtxPopCurrent", 0, 1000, 304)
    saver.pause()
    simulator.tms_sim_fail_after(b"cuCtxPopCurrent", 0, 0, 0)
    saver.resume()
    assert current_context() is None
    assert _core.counters()["quarantined_other"] == 0
""",
        preloaded=False,
        TMS_SIMULATED_DEVICES="2",
        TMS_LOG_LEVEL="silent",
    )
