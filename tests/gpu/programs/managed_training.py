"""Trains a model in a group of one, moves what it has into managed memory after the first steps, and pauses between further
steps. The weights must be those of a training without any of that.

python managed_training.py SCENARIOS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_memory_saver import torch_memory_saver as saver

WIDTH = 32
STEPS = 4
Between = Callable[[int, Any, torch.optim.Optimizer], None]


def train(
    wrap: Callable[[nn.Module], Any],
    between: Between,
    make: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    model = wrap(nn.Sequential(*layers, nn.Linear(WIDTH, 7, bias=False)).cuda())
    optimizer = make(model)
    for step in range(STEPS):
        rows = torch.full((4, WIDTH), 0.25 * (step + 1), device="cuda")
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
        between(step, model, optimizer)
    return [_local(parameter).detach().cpu() for parameter in model.parameters()]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nothing(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    pass


def _cycle() -> None:
    report = saver.pause("training")
    assert (report.bytes > 0, report.no_longer_managed_bytes) == (True, 0)
    other = torch.full((8 << 20,), 0xEE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    saver.resume("training")


def _managing(extra: Callable[[Any], Any]) -> Between:
    def between(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == 0:
            return
        if step == 1:
            handle = saver.manage([model, optimizer, extra(model)], tag="training", backup="host")
            assert handle.moved_bytes > 0
        members = [*model.parameters(), *extra(model)]
        members += [each for state in optimizer.state.values() for each in state.values() if each.is_cuda]
        assert {saver.tag_of(_local(member)) for member in members} == {"training"}
        _cycle()

    return between


def ddp() -> None:
    """The gradients are views of DDP's buckets, which move by them and stay theirs."""

    def wrap(model: nn.Module) -> Any:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.001)

    def gradients(model: Any) -> list[Any]:
        return [parameter.grad for parameter in model.parameters()]

    expected = train(wrap, _nothing)
    storages: list[set[int]] = []

    def look(model: Any) -> list[Any]:
        storages.append({gradient.untyped_storage()._cdata for gradient in gradients(model)})
        return gradients(model)

    actual = train(wrap, _managing(look))
    assert len(storages[0]) > 1, "several buckets"
    assert all(each == storages[0] for each in storages), "the buckets are the same storages"
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def fsdp() -> None:
    def wrap(model: Any) -> Any:
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    expected = train(wrap, _nothing)
    shards: list[int] = []

    def look(model: Any) -> list[Any]:
        parameters = list(model.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        shards.append(parameters[0].to_local().untyped_storage()._cdata)
        return []

    actual = train(wrap, _managing(look))
    assert len(set(shards)) == 1
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def _wrapped(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """An optimizer that keeps another one in its attribute `optim` is managed before it has any state."""

    def look(step: int, model: Any, optimizer: Any) -> None:
        inner = [each for state in optimizer.optim.state.values() for each in state.values() if each.is_cuda]
        assert inner
        assert {saver.tag_of(each) for each in inner} == {"training"}
        _cycle()

    def managed(model: Any) -> torch.optim.Optimizer:
        optimizer = make(model)
        saver.manage(optimizer, tag="training", backup="host")
        return optimizer

    expected = train(DistributedDataParallel, _nothing, make)
    actual = train(DistributedDataParallel, look, managed)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def zero() -> None:
    _wrapped(lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3))


def local_sgd() -> None:
    averager = PeriodicModelAverager(period=2)
    _wrapped(lambda model: PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), averager))


dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
for name in sys.argv[1].split(","):
    {"ddp": ddp, "fsdp": fsdp, "zero": zero, "local_sgd": local_sgd}[name]()
    print("ok:", name)
dist.destroy_process_group()
