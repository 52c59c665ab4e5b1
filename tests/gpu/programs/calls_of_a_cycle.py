"""Prints every call of the driver and the runtime that cycles make in a process that uses GPU 0 of several. The argument
`unwatched`: without the watch for GPUs that are used later. For the simulated GPU."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from torch_memory_saver import _core, torch_memory_saver
from torch_memory_saver._engine.process import late_devices

simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_read_trace.restype = ctypes.c_size_t
if "unwatched" in sys.argv:
    late_devices._has_begun = True  # it seems to have begun

with torch_memory_saver.region(tag="weights"):
    weights = torch.ones(1 << 20, device="cuda:0")
assert torch.cuda.device_count() == 2
assert list(late_devices._pools) == ([] if "unwatched" in sys.argv else [1])
simulator.tms_sim_trace(1)
for _ in range(3):
    ordinary = weights.to(torch.float64).to("cpu").to("cuda:0")
    with torch_memory_saver.region(tag="cache"):
        cache = torch.ones(1 << 20, device="cuda:0")
    torch_memory_saver.pause()
    torch_memory_saver.resume()
    with torch_memory_saver.region(tag="weights"), torch_memory_saver.disable():
        weights.copy_(ordinary)
    del cache
    torch_memory_saver.empty_cache()
    torch.cuda.empty_cache()
torch.cuda.synchronize()
simulator.tms_sim_trace(0)
assert _core.active_devices() == 1

length = simulator.tms_sim_read_trace(None, ctypes.c_size_t(0))
trace = ctypes.create_string_buffer(length + 1)
simulator.tms_sim_read_trace(trace, ctypes.c_size_t(length + 1))
print(trace.value.decode())
