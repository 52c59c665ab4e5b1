"""One of two ranks whose FSDP2 trainer writes a checkpoint while it is parked, from the host copies.

ranks.py explains how it is started. `CHECKPOINT` names the folder. `save` trains, parks, saves, and goes on training. `load`
is a fresh process that loads the checkpoint, and has the same losses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import device, main, rank
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_memory_saver import torch_memory_saver

FOLDER = Path(os.environ["CHECKPOINT"])
STEPS = 3
WIDTH = 31  # not a multiple of the ranks: shards of different sizes


def new_trainer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(8, WIDTH, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def to_host(value: Any) -> Any:
    """The host copy of a paused tensor. Everything else stays as it is, such as the optimizer's counters of steps."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    copy = torch_memory_saver.get_cpu_backup(value)
    assert type(copy) is type(value) and copy.device.type == "cpu" and not copy.requires_grad
    return copy


def save() -> None:
    model, optimizer = new_trainer()
    train(model, optimizer, 0)
    torch_memory_saver.manage([model, optimizer], tag="trainer", backup="host")
    planners = dist.new_group(backend="gloo")
    torch_memory_saver.pause("trainer")
    assert torch_memory_saver.is_paused(model[0].weight)
    weights, moments = get_state_dict(model, optimizer)
    state = tree_map(to_host, {"model": weights, "optimizer": moments})
    assert any(isinstance(leaf, DTensor) for leaf in tree_leaves(state["optimizer"]))
    dcp.save(state, checkpoint_id=FOLDER, process_group=planners)
    assert torch_memory_saver.is_paused(model[0].weight), "the save resumes nothing"
    torch_memory_saver.resume("trainer")
    losses = train(model, optimizer, STEPS)
    (FOLDER / f"losses{rank}").write_text(repr(losses), encoding="ascii")


def load() -> None:
    model, optimizer = new_trainer()
    before = model[0].weight.to_local().clone()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=FOLDER, process_group=dist.new_group(backend="gloo"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert not torch.equal(before, model[0].weight.to_local())
    losses = train(model, optimizer, STEPS)
    assert repr(losses) == (FOLDER / f"losses{rank}").read_text(encoding="ascii"), losses


if __name__ == "__main__":
    main(save, load)
