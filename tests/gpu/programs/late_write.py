"""Writes to guarded memory with a kernel, which loses the device, and reports what the program sees.

TMS_GUARD=1 python late_write.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import MIB, errors, saver, torch

assert saver.guard, "TMS_GUARD=1 is missing"
with saver.region(tag="cache"):
    cache = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
saver.pause()
print("read", int(cache.view(torch.int8).max()), flush=True)
try:
    cache.fill_(1)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("write", str(error).splitlines()[0], flush=True)
else:
    raise SystemExit("failed: a kernel wrote to guarded memory")
try:
    saver.resume()
except errors.DeviceLostError:
    print("lost", flush=True)
