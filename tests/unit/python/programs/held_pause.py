"""A pause with a disk backup that never ends, because work on the device does not end. Prints "held" when it waits.

held_pause.py [copying | exit | print]: it is the copy that does not end; SIGTERM makes it exit with status 5; or is caught,
and what is then true printed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
ENDING = sys.argv[1] if len(sys.argv) > 1 else "default"

simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)


def allocate(tag: str) -> int:
    level = _core.region_enter(tag, _core.BACKUP_DISK, True)
    address = _core.allocate(2 * MIB, 0)
    _core.region_leave(level)
    ctypes.memset(address, 7, 2 * MIB)
    return address


def end(number: int, frame: object) -> NoReturn:
    sys.exit(5)


if ENDING in ("exit", "print"):
    signal.signal(signal.SIGTERM, end)

paused, held = allocate("paused"), allocate("held")
saver.pause("paused")
context = ctypes.c_void_p()
assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert simulator.cuCtxPushCurrent_v2(context) == 0
if ENDING == "copying":
    simulator.tms_sim_set_bandwidth(ctypes.c_uint64(1))
else:
    assert simulator.tms_sim_launch_add(None, held, MIB, 1, 1) == 0


def tell() -> None:
    simulator.tms_sim_wait_until_synchronizing()
    print("held", flush=True)


threading.Thread(target=tell, daemon=True).start()
try:
    saver.pause("held")
except (SystemExit, KeyboardInterrupt) as error:
    if ENDING != "print":
        raise
    states = [_core.find(address).state for address in (paused, held)]
    assert states == [_core.STATE_PAUSED, _core.STATE_ACTIVE], states
    simulator.tms_sim_open_gate(1)
    saver.pause("held")
    saver.resume()
    assert ctypes.string_at(paused, 2 * MIB) == bytes([7]) * 2 * MIB
    assert ctypes.string_at(held, 2 * MIB) == bytes([8]) * MIB + bytes([7]) * MIB
    files = [path.name for path in Path(os.environ["TMS_DISK_BACKUP_DIR"]).glob("*.backup")]
    print(type(error).__name__, len(files), "files", flush=True)
