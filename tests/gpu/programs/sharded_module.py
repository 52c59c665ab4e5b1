"""Trains a model that FSDP1 shards over two GPUs, and pauses it in each state that its parameters have in turn. No pause may
report that parameters have left managed memory.

python sharded_module.py FILE, which does not exist yet: the ranks meet there.
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from torch_memory_saver import torch_memory_saver as saver

WIDTH = 256


def cycle(tag: str) -> int:
    left = saver.pause(tag).no_longer_managed_bytes
    saver.resume(tag)
    return left


def train(tag: str, keeps_parameters: bool, strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    inner = [FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH).cuda(), None, strategy, use_orig_params=keeps_parameters)]
    model = FullyShardedDataParallel(
        nn.Sequential(*inner, nn.Linear(WIDTH, WIDTH).cuda()), None, strategy, use_orig_params=keeps_parameters
    )
    assert saver.manage(model, tag=tag, backup="host").moved_bytes >= WIDTH * WIDTH * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH, device="cuda")).sum()
        assert cycle(tag) == 0
        loss.backward()
        assert cycle(tag) == 0
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        assert cycle(tag) == 0
    assert cycle(tag) == 0


def main(rank: int, file: str) -> None:
    messages: list[str] = []
    logging.getLogger("torch_memory_saver").addFilter(lambda record: messages.append(record.getMessage()) or True)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{file}", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    for keeps_parameters in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            train(f"{keeps_parameters} {strategy.name}", keeps_parameters, strategy)
    assert not any("no longer in managed memory" in message for message in messages), messages
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("ok")


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=2)
