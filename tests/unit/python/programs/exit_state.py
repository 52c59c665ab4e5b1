"""Ends in a state and in a way that its arguments name: exit_state.py STATE ENDING. Prints nothing itself.

Without PyTorch: managed memory of the simulated GPU that TMS_CUDA_DRIVER names, with a backup of each kind.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
BACKUPS = (_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP, _core.BACKUP_DISK)

simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)


class Owner:
    """Frees its memory when it goes: for a module's global, that is when the interpreter ends."""

    def __init__(self, tag: str, backup: int) -> None:
        level = _core.region_enter(tag, backup, True)
        self.address = _core.allocate(2 * MIB, 0)
        _core.region_leave(level)
        ctypes.memset(self.address, 7, 2 * MIB)

    def __del__(self) -> None:
        _core.free(self.address)


def hold() -> None:
    """Work on the device that never ends."""
    context = ctypes.c_void_p()
    assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert simulator.cuCtxPushCurrent_v2(context) == 0
    assert simulator.tms_sim_launch_add(None, owners[0].address, MIB, 1, 1) == 0


def pause_on_another_thread() -> None:
    hold()
    threading.Thread(target=saver.pause, args=("kept",), daemon=True).start()
    simulator.tms_sim_wait_until_synchronizing()


def region() -> None:
    _core.region_enter("inner", _core.BACKUP_PINNED, True)
    owners.append(Owner("inner", _core.BACKUP_NONE))


def retained() -> None:
    saver.retain_cpu_backup = True
    saver.pause()
    saver.resume()


def view() -> None:
    saver.pause()
    views.append(_core.host_backup(owners[1].address, 2 * MIB))


def releasing() -> None:
    """Host memory is being released, for which the driver waits for the device, where a kernel never ends."""
    del owners[2:]  # The resume itself releases the memory of these.
    saver.pause()
    hold()
    saver.resume()
    simulator.tms_sim_wait_until_synchronizing()
    Owner.__del__ = lambda self: None  # type: ignore[method-assign] # A free would wait for it as well, as cudaFree does.


def paused_capture() -> None:
    saver.pause("kept")
    _core.capture_begin("captured", _core.BACKUP_NONE)
    owners.pop()


def exclusive() -> None:
    saver.pause()
    saver.resume(exclusive=True)


def damaged() -> None:
    """The driver fails to release memory, and always will."""
    simulator.tms_sim_fail_after(b"cuMemUnmap", ctypes.c_uint64(0), ctypes.c_uint64(1 << 40), 304)
    try:
        saver.pause()
    except RuntimeError:
        return
    raise AssertionError


STATES = {
    "unused": lambda: owners.clear(),
    "active": lambda: None,
    "paused": lambda: saver.pause(),
    "resumed": lambda: [saver.pause(), saver.resume()],
    "region": region,
    "retained": retained,
    "view": view,
    "capture": paused_capture,
    "exclusive": exclusive,
    "damaged": damaged,
    "pause_on_another_thread": pause_on_another_thread,
    "releasing": releasing,
}

owners = [Owner("kept", backup) for backup in BACKUPS]
views: list[object] = []

STATES[sys.argv[1]]()

ENDINGS = {
    "fall_off": lambda: None,
    "exit_0": lambda: sys.exit(0),
    "exit_3": lambda: sys.exit(3),
    "exit_text": lambda: sys.exit("the program's own words"),
    "exception": lambda: {}["missing"],
    "_exit": lambda: os._exit(4),
}
ENDINGS[sys.argv[2]]()
