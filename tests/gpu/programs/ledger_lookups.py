"""What the ledger counts in a program started by `run --ledger`: memory of functions that were looked up, once each."""

from __future__ import annotations

import ctypes
import os

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
SIZE = 64 * MIB


def size_of(holder: str) -> int:
    ledger = saver.ledger(0)[0]
    assert sum(line.bytes or 0 for line in ledger.lines) == ledger.used_bytes
    return sum(line.bytes or 0 for line in ledger.of(holder))


def sizes() -> tuple[int, int, int]:
    return size_of("managed"), size_of("torch"), size_of("library")


def grown(before: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(after - earlier for after, earlier in zip(sizes(), before, strict=True))


assert _core.preloaded and _core.get_ledger()
torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
address = ctypes.c_void_p()
driver = ctypes.CDLL(os.environ.get("TMS_CUDA_DRIVER", "libcuda.so.1"))

before = sizes()
assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
assert grown(before) == (0, 0, SIZE)
assert "only with" not in " ".join(line.note for line in saver.ledger(0)[0].of("library"))
assert driver.cuMemFree_v2(address) == 0
assert grown(before) == (0, 0, 0)

# The runtime's function, which calls the driver's: once.
assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
assert grown(before) == (0, 0, SIZE)
assert ctypes.CDLL(None).cudaFree(address) == 0

# PyTorch looks up the driver's functions for expandable segments.
ordinary = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
assert grown(before) == (0, SIZE, 0)
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
expandable = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
torch.cuda.memory._set_allocator_settings("expandable_segments:False")
of_torch = grown(before)[1]  # mapped in larger pieces
assert of_torch >= 2 * SIZE
assert grown(before) == (0, of_torch, 0)

with saver.region("weights", enable_cpu_backup=True):
    managed = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda")
assert grown(before) == (SIZE, of_torch, 0)
saver.pause("weights")
assert grown(before) == (0, of_torch, 0)
saver.resume("weights")
assert grown(before) == (SIZE, of_torch, 0)
assert int(managed[-1]) == 7

del ordinary, expandable
torch.cuda.empty_cache()
assert grown(before) == (SIZE, 0, 0)
print("ok", flush=True)
