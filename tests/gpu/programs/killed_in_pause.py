"""Is killed in the middle of a pause with disk backups: when the first file is there and the pause is not over.

python killed_in_pause.py DIRECTORY BYTES
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import SIMULATED, core, empty, saver, state_of

COUNT = 8
directory, size = Path(sys.argv[1]), int(sys.argv[2])
saver.set_disk_backup_dir(directory)
with saver.region(tag="weights", enable_disk_backup=True):
    tensors = [empty(size // COUNT) for _ in range(COUNT)]
for value, tensor in enumerate(tensors):
    tensor.fill_(value)
others = set(directory.glob("*.backup"))
begin = threading.Event()


def kill_when_something_is_written() -> None:
    begin.set()
    while True:
        states = {state_of(tensor) for tensor in tensors}
        # Backup files keep their names; a lock file is renamed during this search.
        written = sum(path.stat().st_size for path in set(directory.glob("*.backup")) - others)
        if states == {core.STATE_PAUSED}:
            print("failed: the pause was over before anything was seen", flush=True)
            return
        if states == {core.STATE_PAUSING} and written > 0:
            os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=kill_when_something_is_written, daemon=True).start()
begin.wait()
if SIMULATED:  # its copies would be over before the thread has looked
    ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"]).tms_sim_set_bandwidth(ctypes.c_uint64(size // COUNT))
saver.pause("weights")
