"""Regions with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True from the start, as many RL recipes set it."""

from __future__ import annotations

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20

plain = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda")
with saver.region(tag="kv_cache"):
    cache = torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda")
graph = torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="cuda_graph"):
    result = weights + plain
assert _core.find(plain.data_ptr()) is None
assert all(_core.find(tensor.data_ptr()) for tensor in (weights, cache, result))
torch.cuda.synchronize()
before = torch.cuda.mem_get_info()[0]
report = saver.pause()
gained = torch.cuda.mem_get_info()[0] - before
assert report.bytes >= 3 * 64 * MIB
assert abs(gained - report.bytes) <= 4 * MIB, (gained, report)
assert bool((plain == 1).all())
saver.resume()
graph.replay()
assert bool((result == 3).all())
assert bool((weights == 2).all())
cache.fill_(4)
assert bool((cache == 4).all())
del graph, result, weights, cache
saver.pause()
saver.resume()
torch.cuda.synchronize()
print("ok")
