"""Pauses and resumes for test_nvtx.py, with a tool attached to NVTX: on the main thread, on another one, in the background,
with failures, and in a forked child. Prints "ok" and the child's number. With the argument "without" there is no tool."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
OUT_OF_MEMORY = 2
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])


def loaded() -> bool:
    with open("/proc/self/maps") as maps:
        return os.environ["NVTX_INJECTION64_PATH"] in maps.read()


assert not loaded(), "the import attaches no tool"
level = _core.region_enter("kv", _core.BACKUP_NONE, True)
kept = [_core.allocate(size * MIB, 0) for size in (2, 4)]
_core.region_leave(level)
assert not loaded(), "an allocation attaches no tool"
saver.pause("kv")
assert loaded() or "without" in sys.argv
saver.resume(["kv"])
# On another thread, whose ranges end there.
thread = threading.Thread(target=saver.pause, args=(["kv", "other"],))
thread.start()
thread.join()
pending = saver.resume(wait=False)
pending.wait()
saver.pause()
simulator.tms_sim_fail_after(b"cuMemCreate", ctypes.c_uint64(1), ctypes.c_uint64(1), OUT_OF_MEMORY)
try:
    saver.resume()
except errors.OutOfMemoryError:
    pass
else:
    raise AssertionError("the resume had too little memory")
if (child := os.fork()) == 0:
    # The parent's memory is not the child's, and neither is its tool.
    try:
        saver.resume()
    except errors.ForkedProcessError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
saver.resume()
for address in kept:
    _core.free(address)
print("ok", child)
