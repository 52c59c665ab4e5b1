"""Forks in the state that its first argument names, in the way that its second one does. The child asks for everything there
is and ends; the parent then finds its memory and files as they were. Prints "ok".

fork_state.py active|paused|held fork|multiprocessing|exit
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
BACKUPS = (_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP, _core.BACKUP_DISK)
STATE, WAY = sys.argv[1:]

simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)


def allocate(backup: int) -> int:
    level = _core.region_enter("weights", backup, True)
    address = _core.allocate(2 * MIB, 0)
    _core.region_leave(level)
    ctypes.memset(address, 7 + backup, 2 * MIB)
    return address


def files() -> list[str]:
    return sorted(path.name for path in Path(os.environ["TMS_DISK_BACKUP_DIR"]).glob("*"))


def must_be_refused(call: Any) -> None:
    try:
        call()
    except errors.ForkedProcessError:
        return
    raise AssertionError(call)


def child() -> None:
    before = files()
    # Functions that need no GPU work.
    assert len(_core.segments()) == len(addresses)
    stats = saver.stats()
    assert stats.tags["weights"].allocations == len(addresses), stats
    assert _core.counters()["allocations"] == len(addresses)
    level = _core.region_enter("child", _core.BACKUP_PINNED, True)
    assert _core.region_current() == ("child", _core.BACKUP_PINNED, True, 1, True)
    _core.region_leave(level)
    saver.retain_cpu_backup = True
    saver.memory_margin_bytes = 5
    assert (saver.retain_cpu_backup, saver.memory_margin_bytes) == (True, 5)
    assert _core.tag_info("never") == (0, 0, 0)
    try:
        _core.host_backup(0x1000, 1)
    except errors.NotManagedError:
        pass
    else:
        raise AssertionError
    saver.set_disk_backup_dir(os.environ["TMS_DISK_BACKUP_DIR"])
    try:
        saver.pause(3)  # type: ignore[arg-type]
    except errors.InvalidArgumentError:
        pass
    else:
        raise AssertionError("a tag that is not a str was accepted")
    # Functions that need it are refused.
    for call in (
        saver.pause,
        saver.resume,
        lambda: saver.resume(timeout=60, exclusive=True),
        lambda: saver.pause("unused"),
        saver.enable_peer_access,
        lambda: _core.allocate(1, 0),
        lambda: _core.allocate(1),
        _core.device_count,
        _core.active_devices,
        lambda: _core.device_memory(0),
        lambda: _core.device_info(0),
        lambda: _core.capture_begin("graph", 0),
    ):
        must_be_refused(call)
    if STATE == "paused":
        # The copy is in memory that this process does not have.
        for address, backup in zip(addresses, BACKUPS, strict=True):
            if backup in (_core.BACKUP_PINNED, _core.BACKUP_MMAP):
                must_be_refused(lambda address=address: _core.host_backup(address, 1))
    # The parent's memory is not freed, and its files are not removed.
    assert all(_core.free(address) for address in addresses)
    assert files() == before, (files(), before)


addresses = [allocate(backup) for backup in BACKUPS]
thread = None
if STATE == "paused":
    saver.pause()
elif STATE == "held":
    context = ctypes.c_void_p()
    assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert simulator.cuCtxPushCurrent_v2(context) == 0
    assert simulator.tms_sim_launch_add(None, addresses[3], 2 * MIB, 0, 1) == 0
    thread = threading.Thread(target=saver.pause)
    thread.start()
    simulator.tms_sim_wait_until_synchronizing()

before = files()
if WAY == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    status = process.exitcode
else:
    pid = os.fork()
    if pid == 0:
        if WAY == "exit":
            # Ends as programs do: the handlers of the interpreter and of the C library run.
            thread = None
            child()
            sys.exit(9)
        code = 1
        try:
            child()
            code = 9
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == (0 if WAY == "multiprocessing" else 9), status
assert files() == before, (files(), before)
if thread is not None:
    simulator.tms_sim_open_gate(1)
    thread.join()
if STATE == "active":
    saver.pause()
report = saver.resume()
assert report.allocations == len(addresses), report
for address, backup in zip(addresses, BACKUPS, strict=True):
    value = 0xA5 if backup == _core.BACKUP_NONE else 7 + backup
    assert ctypes.string_at(address, 2 * MIB) == bytes([value]) * 2 * MIB, backup
print("ok")
