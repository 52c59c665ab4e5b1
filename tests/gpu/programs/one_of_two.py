"""Uses GPU 0 of several: no context is created on GPU 1, and GPU 1 gets no access until it is used."""

from __future__ import annotations

import ctypes

import torch

from torch_memory_saver import _core, torch_memory_saver

SIZE = 64 << 20
READ_WRITE = 3


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def access(address: int, device: int) -> int:
    flags = ctypes.c_ulonglong()
    location = Location(1, device)
    result = ctypes.CDLL("libcuda.so.1").cuMemGetAccess(
        ctypes.byref(flags), ctypes.byref(location), ctypes.c_uint64(address)
    )
    assert result == 0, result
    return flags.value


with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
    tensor = torch.full((SIZE,), 5, dtype=torch.uint8, device="cuda:0")
for _ in range(2):
    torch_memory_saver.pause()
    torch_memory_saver.resume()
assert _core.active_devices() == 1, _core.active_devices()
assert access(tensor.data_ptr(), 0) == READ_WRITE
assert access(tensor.data_ptr(), 1) == 0, "an unused peer costs nothing"

# Now the program begins to use GPU 1: the next resume, or enable_peer_access(), gives it access.
other = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:1")
torch.cuda.synchronize(1)
assert _core.active_devices() == 3
torch_memory_saver.enable_peer_access()
assert access(tensor.data_ptr(), 1) == READ_WRITE
other.copy_(tensor)
assert bool((other == 5).all())
other.fill_(6)
tensor.copy_(other)
assert bool((tensor == 6).all())
print("ok")
