"""NCCL's memory in the ledger, in each of two processes started by torchrun under `run --ledger`."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from torch_memory_saver import torch_memory_saver as saver

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)


def nccl() -> tuple[int, int]:
    ledger = saver.ledger(rank)[rank]
    assert sum(line.bytes or 0 for line in ledger.lines) == ledger.used_bytes
    lines = [line for line in ledger.of("library") if line.name == "NCCL"]
    assert len(lines) <= 1
    return sum(line.bytes or 0 for line in lines), sum(line.allocations or 0 for line in lines)


values = torch.ones(1 << 20, device="cuda")
before = nccl()
used_before = torch.cuda.mem_get_info(rank)[0]
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
dist.all_reduce(values)
torch.cuda.synchronize()
assert float(values[0]) == 2.0
held = nccl()
taken = used_before - torch.cuda.mem_get_info(rank)[0]
saver.pause()
paused = nccl()
saver.resume()
dist.barrier()
dist.destroy_process_group()
torch.cuda.synchronize()
print(json.dumps({"before": before, "held": held, "paused": paused, "after": nccl(), "taken": taken}), flush=True)
