"""Pauses and resumes between ranges of PyTorch's own, for test_nvtx.py. Prints the bytes of the memory that moves."""

from __future__ import annotations

import torch

from torch_memory_saver import torch_memory_saver as saver

SIZE = 64 << 20

with saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
with torch.cuda.nvtx.range("step"):
    saver.pause("weights")
    with torch.cuda.nvtx.range("training"):
        work = weights.new_empty(0)
    pending = saver.resume("weights", wait=False)
    pending.wait()
assert bool((weights == 1).all())
print(SIZE)
