"""Pauses and resumes segments with holes while a shim in front of the driver refuses to pin host memory.

The shim is the library that TMS_CUDA_DRIVER names. It counts the refused calls and the batches of copies, which it forwards.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import MIB, checksum, empty, fill_random, saver, torch

SIZES = [64 << 10, 200_000, MIB - 512, 3 * MIB, 64 << 10, 8 * MIB, 512, 5 * MIB + 512, 640 << 10, 2 * MIB] * 3

shim = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])

with saver.region(tag="weights", enable_cpu_backup=True):
    tensors: list[Any] = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in SIZES]
del tensors[::2]
for seed, tensor in enumerate(tensors):
    fill_random(tensor, seed)
sums = [checksum(tensor) for tensor in tensors]
for _ in range(2):
    paused = saver.pause("weights")
    assert 0 < paused.copied_bytes < paused.bytes, paused
    other = empty(64 * MIB)
    other.fill_(0xA5)
    del other
    assert saver.resume("weights").copied_bytes == paused.copied_bytes
    assert [checksum(tensor) for tensor in tensors] == sums
assert shim.tms_shim_refused() > 0
assert shim.tms_shim_batches() == 0
print("same bytes")
