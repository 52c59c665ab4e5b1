"""One process a GPU: an all-reduce captured in a graph, all of it managed, replays after a pause on every rank.

Run by torchrun with two processes, with NCCL_GRAPH_REGISTER=0: NCCL's graph registration keeps the physical memory, not the
address.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))

with saver.region(tag="weights", enable_cpu_backup=True):
    values = torch.full((1 << 22,), float(rank + 1), device="cuda")
with saver.region(tag="kv_cache"):
    result = torch.zeros(1 << 22, device="cuda")
dist.all_reduce(result)  # the communicator exists before the capture
torch.cuda.synchronize()

graph = torch.cuda.CUDAGraph()
# The process group's watchdog thread may not be subject to the rules of this capture.
with saver.cuda_graph(graph, capture_error_mode="thread_local", tag="cuda_graph"):
    doubled = values * 2
    dist.all_reduce(doubled)
    result.copy_(doubled)
expected = 2.0 * sum(range(1, world + 1))
for cycle in range(3):
    for tag in ("kv_cache", "weights", "cuda_graph"):
        saver.pause(tag)
    assert _core.counters()["resident_bytes"] == 0
    dist.barrier()
    for tag in ("cuda_graph", "weights", "kv_cache"):
        saver.resume(tag)
    result.zero_()
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == expected).all()), (cycle, result[:4].tolist(), expected)
    # An ordinary collective on resumed memory works as well.
    dist.all_reduce(result)
    assert bool((result == expected * world).all())
del graph
torch.cuda.synchronize()
dist.destroy_process_group()
print("ok", flush=True)
