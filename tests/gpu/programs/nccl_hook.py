"""Registers the NCCL hook in a process that is a group of one, pauses and resumes twice, and prints what the hook says."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from torch_memory_saver import nccl
from torch_memory_saver import torch_memory_saver as saver

dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
groups = [dist.new_group([0]) for _ in range(2)]
cpu = dist.new_group([0], backend="gloo")
hook = nccl.suspend_on_pause("w")
lazily = hook.what_stays()
numbers = torch.ones(1000, device="cuda")
dist.all_reduce(numbers)
dist.all_reduce(numbers, group=groups[1])
with saver.region(tag="w"):
    weights = torch.ones(1 << 20, device="cuda")
can = hasattr(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")), "suspend")
answers = []
for _ in range(2):
    saver.pause("w")
    answers.append(hook.suspended)
    saver.resume("w")
    dist.all_reduce(numbers)
    dist.all_reduce(numbers, group=groups[1])
assert bool((numbers == 1).all())
print(
    json.dumps(
        {
            "lazily": lazily,
            "stays": hook.what_stays(),
            "suspended": answers,
            "after": hook.suspended,
            "can": can,
            "version": torch.__version__,
        }
    )
)
del weights
dist.destroy_process_group()
