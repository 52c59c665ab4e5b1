"""One of two ranks that train one model; ranks.py explains how it is started.

Each rank has one half of every batch. The resulting parameters are compared with those of the same training on the CPU, with
whole batches and without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ranks import RANKS, device, main, rank
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_memory_saver import torch_memory_saver

STEPS = 4
ROWS = 8
WORDS = 50
WIDTH = 24
#: Not a multiple of the ranks: shards of different sizes.
CLASSES = 7

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # The gradient of a key's bias would be only rounding errors.
        self.attention = nn.MultiheadAttention(WIDTH, 4, bias=False, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + self.wide(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.rarely = nn.Linear(WIDTH, WIDTH)  # only `skips` takes part in it
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden.mean(dim=1)
        return self.classes(self.rarely(hidden) if rarely else hidden)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # With a smaller eps, rounding errors of almost zero gradients would make large steps.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def batches() -> Iterator[Batch]:
    """Whole batches, the same in all processes."""
    source = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (ROWS, 5), generator=source)
        yield words, torch.randint(CLASSES, (ROWS,), generator=source)


def mine(batch: Batch) -> Batch:
    words, wanted = (part.chunk(RANKS)[rank].to(device) for part in batch)
    return words, wanted


def loss_of(model: nn.Module, batch: Batch, **arguments: bool) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0], **arguments), batch[1])


def on_the_cpu(step: Callable[[nn.Module, Batch], None], rounds: int = 1) -> Model:
    """The model that the training of whole batches on the CPU results in."""
    model = new_model()
    optimizer = new_optimizer(model)
    for batch in (batch for _ in range(rounds) for batch in batches()):
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return model


def plain(model: nn.Module, batch: Batch) -> None:
    loss_of(model, batch).backward()


def expect(actual: dict[str, Any], wanted: Model) -> None:
    """The parameters are those of a model on the CPU, which has learnt something."""
    before, after = new_model().state_dict(), wanted.state_dict()
    assert actual.keys() == after.keys()
    for name, tensor in after.items():
        assert not torch.equal(tensor, before[name]), f"{name} has not been trained: this test shows nothing"
        found = actual[name].to(device)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found.cpu(), tensor, msg=lambda text, name=name: f"{name}: {text}")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in batches():
        loss_of(model, mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_parallel(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(new_model().to(device), device_ids=[rank], **options)


def ddp() -> None:
    """Also with a rank whose parameters are others at first: rank 0's count."""
    model = new_model().to(device)
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3)
    model = DistributedDataParallel(model, device_ids=[rank])
    train(model, new_optimizer(model))
    expect(model.module.state_dict(), on_the_cpu(plain))


def ddp_buckets() -> None:
    """Gradients are reduced bucket by bucket, during the backward pass."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = in_parallel(bucket_cap_mb=0.01, **options)
        train(model, new_optimizer(model))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert len(sizes) > 3, f"the gradients have been in {len(sizes)} buckets: {sizes}"
        expect(model.module.state_dict(), on_the_cpu(plain))


def ddp_accumulates() -> None:
    """Gradients of two halves of a batch add up on each rank, and are reduced after the second."""

    def halves(model: nn.Module, batch: Batch) -> None:
        for half in range(2):
            parts = [torch.cat([part.chunk(4)[half], part.chunk(4)[2 + half]]) for part in batch]
            loss_of(model, (parts[0], parts[1])).backward()

    model = in_parallel(bucket_cap_mb=0.01)
    optimizer = new_optimizer(model)
    for batch in batches():
        words, wanted = mine(batch)
        for half in range(2):
            with model.no_sync() if half == 0 else nullcontext():
                loss_of(model, (words.chunk(2)[half], wanted.chunk(2)[half])).backward()
            if half == 0:
                gradients = [torch.zeros_like(model.module.classes.bias) for _ in range(RANKS)]
                dist.all_gather(gradients, model.module.classes.bias.grad)
                assert not torch.equal(*gradients), "gradients have been reduced inside of no_sync()"
        optimizer.step()
        optimizer.zero_grad()
    expect(model.module.state_dict(), on_the_cpu(halves))


def ddp_unused() -> None:
    """A part of the model that only rank 1 has used: its gradient is half of that."""

    def halves(model: nn.Module, batch: Batch) -> None:
        for part in range(RANKS):
            words, wanted = (tensor.chunk(RANKS)[part] for tensor in batch)
            (loss_of(model, (words, wanted), rarely=part == 1) / RANKS).backward()

    model = in_parallel(find_unused_parameters=True)
    optimizer = new_optimizer(model)
    for batch in batches():
        loss_of(model, mine(batch), rarely=rank == 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    expect(model.module.state_dict(), on_the_cpu(halves))


def sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fsdp() -> None:
    for reshard in (True, False):
        model = sharded(new_model().to(device), reshard_after_forward=reshard)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel(), name
            assert parameter.to_local().device == device
        train(model, new_optimizer(model))
        expect(model.state_dict(), on_the_cpu(plain))


def fsdp_clips() -> None:
    """The norm of all gradients, of which each rank has a part."""
    norms: dict[str, list[float]] = {"cpu": [], "cuda": []}

    def clipped(model: nn.Module, batch: Batch) -> None:
        loss_of(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms[batch[0].device.type].append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    model = sharded(new_model().to(device))
    optimizer = new_optimizer(model)
    for batch in batches():
        clipped(model, mine(batch))
        optimizer.step()
        optimizer.zero_grad()
    expect(model.state_dict(), on_the_cpu(clipped))
    assert min(norms["cpu"]) > 0.5, "nothing was clipped: this test shows nothing"
    torch.testing.assert_close(torch.tensor(norms["cuda"]), torch.tensor(norms["cpu"]))


def fsdp_accumulates() -> None:
    def twice(model: nn.Module, batch: Batch) -> None:
        for _ in range(2):
            loss_of(model, batch).backward()

    model = sharded(new_model().to(device))
    optimizer = new_optimizer(model)
    for batch in batches():
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss_of(model, mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expect(model.state_dict(), on_the_cpu(twice))


def fsdp_offloads() -> None:
    """Shards and the optimizer are on the CPU, and go to the device for each layer's work."""
    model = sharded(new_model(), offload_policy=CPUOffloadPolicy())
    assert all(parameter.to_local().device.type == "cpu" for parameter in model.parameters())
    train(model, new_optimizer(model))
    expect(model.state_dict(), on_the_cpu(plain))


def fsdp_state() -> None:
    """The whole state is gathered on rank 0, and goes from there to a new model, which continues."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = sharded(new_model().to(device))
    optimizer = new_optimizer(model)
    train(model, optimizer)
    state, learnt = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        assert all(tensor.device.type == "cpu" and not isinstance(tensor, DTensor) for tensor in state.values())
        expect(state, on_the_cpu(plain))
        assert learnt["state"].keys() == dict(new_model().named_parameters()).keys()
    else:
        assert not state, "only rank 0 has the whole state"

    with torch.device("meta"):
        again = Model()
    again = sharded(again)
    again.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, state, options=options)
    restored = new_optimizer(again)
    set_optimizer_state_dict(again, restored, learnt, options=options)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local()), name
    # The first training is over: torch gives both optimizers the same tensors of their steps on rank 0.
    train(again, restored)
    expect(again.state_dict(), on_the_cpu(plain, rounds=2))


def fsdp_sleeps() -> None:
    """What a trainer that shares its GPU does: between steps, its shards and its optimizer's state are paused."""
    region = {"tag": "training", "enable_cpu_backup": True}
    with torch_memory_saver.region(**region):
        model = sharded(new_model().to(device))
        optimizer = new_optimizer(model)
    for batch in batches():
        with torch_memory_saver.region(**region):
            loss_of(model, mine(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch_memory_saver.pause("training").bytes > 0
        dist.barrier()
        torch_memory_saver.resume("training")
    expect(model.state_dict(), on_the_cpu(plain))


def train_and_sleep(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Moves everything into managed memory before the third step, gradients of buckets included, and pauses it between
    further steps. DDP makes its buckets again after the first step."""
    for number, batch in enumerate(batches()):
        if number == 2:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch_memory_saver.manage([model, optimizer, gradients], tag="training", backup="host")
        loss_of(model, mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if number < 2:
            continue
        members = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
        assert {torch_memory_saver.tag_of(member) for member in members} == {"training"}
        assert torch_memory_saver.pause("training").bytes > 0
        dist.barrier()
        torch_memory_saver.resume("training")


def ddp_managed() -> None:
    model = in_parallel(bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    train_and_sleep(model, new_optimizer(model))
    assert {torch_memory_saver.tag_of(parameter.grad) for parameter in model.parameters()} == {"training"}
    expect(model.module.state_dict(), on_the_cpu(plain))


def fsdp_managed() -> None:
    for reshard in (True, False):
        model = sharded(new_model().to(device), reshard_after_forward=reshard)
        train_and_sleep(model, new_optimizer(model))
        expect(model.state_dict(), on_the_cpu(plain))


if __name__ == "__main__":
    scenarios = (ddp, ddp_buckets, ddp_accumulates, ddp_unused, ddp_managed)
    main(*scenarios, fsdp, fsdp_clips, fsdp_accumulates, fsdp_offloads, fsdp_state, fsdp_sleeps, fsdp_managed)
