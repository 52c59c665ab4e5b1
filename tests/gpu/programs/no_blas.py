"""A region and a pause in a process that never used cuBLAS: nothing of it is initialised, and no device comes into use."""

from __future__ import annotations

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._torch.graphs.kept_objects import workspace_sizes

ordinary = torch.ones(1024, device="cuda")
devices = _core.active_devices()
for _ in range(2):
    with saver.region(tag="engine"):
        kept = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    saver.pause("engine")
    saver.resume("engine")
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    ordinary.add_(1)
assert _core.active_devices() == devices == 1, (devices, _core.active_devices())
blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"] if block["state"] != "inactive"]
assert not [block for block in blocks if block["requested_size"] in workspace_sizes()], blocks
print("ok")
