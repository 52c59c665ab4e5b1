"""One of the ranks that torchrun starts, several of which may use one GPU: first the even ranks pause, then all.

    torchrun torchrun_pauses.py regions|everything

Either the memory of a region is managed, or everything by TMS_INIT_ENABLE=1.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
import torch.distributed as dist
from gpu_support import MIB, assert_close_to, checksum, core, empty, fill_random, free_bytes, saver

SIZE = 64 * MIB

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
devices = torch.cuda.device_count()
device = rank % devices
torch.cuda.set_device(device)
dist.init_process_group("gloo")  # NCCL refuses two ranks on one GPU

with nullcontext() if sys.argv[1] == "everything" else saver.region(tag="default", backup="host"):
    weights = empty(SIZE, device)
fill_random(weights, rank)
expected = checksum(weights)
torch.cuda.synchronize()
dist.barrier()
before = free_bytes(device)
dist.barrier()


def expect_paused(ranks: range) -> None:
    """These ranks are paused, and no rank allocates or frees before all have looked."""
    dist.barrier()
    here = sum(other % devices == device for other in ranks)
    assert_close_to(free_bytes(device) - before, here * SIZE, f"rank {rank}: given back by {here} ranks on GPU {device}")
    dist.barrier()


for _ in range(2):
    if rank % 2 == 0:
        assert saver.pause().bytes >= SIZE
    expect_paused(range(0, world, 2))
    if rank % 2 == 1:
        assert checksum(weights) == expected
        assert saver.pause().bytes >= SIZE
    assert core.counters()["resident_bytes"] == 0
    expect_paused(range(world))
    saver.resume()
    assert checksum(weights) == expected
    expect_paused(range(0))
dist.destroy_process_group()
print("ok", flush=True)
