"""Operators during a capture of their stream. Each has its own process: some leave PyTorch's allocator in the capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, attempt, during_capture

#: The actions to capture. The argument is a float32 matrix that was used before the capture.
ACTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda tensor: tensor + 1,
    "matmul": lambda tensor: tensor @ tensor,
    "sort": lambda tensor: tensor.sort(),
    "topk": lambda tensor: tensor.topk(2),
    "rand": lambda tensor: torch.rand(4, device=tensor.device),
    "dropout": lambda tensor: functional.dropout(tensor, 0.5, True),
    "randperm": lambda tensor: torch.randperm(8, device=tensor.device),
    "multinomial": lambda tensor: tensor.multinomial(1),
    "seed": lambda tensor: torch.cuda.manual_seed(1),
    "get state": lambda tensor: torch.cuda.get_rng_state(),
    "generator": lambda tensor: torch.rand(4, device=tensor.device, generator=torch.Generator(tensor.device)),
    "item": lambda tensor: tensor[0, 0].item(),
    "bool": lambda tensor: bool((tensor > 0).all()),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "allclose": lambda tensor: torch.allclose(tensor, tensor),
    "print": lambda tensor: str(tensor),
    "to the host": lambda tensor: tensor.cpu(),
    "to the host, non_blocking": lambda tensor: tensor.to("cpu", non_blocking=True),
    "to pinned memory": lambda tensor: torch.empty(4, 4, pin_memory=True).copy_(tensor, non_blocking=True),
    "from the host": lambda tensor: tensor.copy_(torch.ones(4, 4)),
    "from the host, non_blocking": lambda tensor: tensor.copy_(torch.ones(4, 4), non_blocking=True),
    "from a list": lambda tensor: torch.tensor([1.0, 2.0], device=tensor.device),
    "zeros": lambda tensor: torch.zeros(1 << 20, device=tensor.device),
    "arange": lambda tensor: torch.arange(8, device=tensor.device),
    "nonzero": lambda tensor: tensor.nonzero(),
    "nonzero_static": lambda tensor: tensor.nonzero_static(size=4),
    "mask": lambda tensor: tensor[tensor > 0],
    "masked_select": lambda tensor: tensor.masked_select(tensor > 0),
    "assignment by a mask": lambda tensor: tensor.index_put_((tensor > 0,), torch.zeros((), device=tensor.device)),
    "masked_fill": lambda tensor: tensor.masked_fill_(tensor > 0, 1.0),
    "unique": lambda tensor: tensor.unique(),
    "bincount": lambda tensor: tensor.long()[0].bincount(),
    "repeat_interleave": lambda tensor: tensor.repeat_interleave(tensor[0].long(), dim=0),
    "split by a tensor": lambda tensor: tensor.tensor_split(torch.tensor([1, 2])),
    "indices": lambda tensor: tensor[tensor[0].long().clamp(max=3)],
    "indices from a list": lambda tensor: tensor[[0, 1]],
    "inverse": lambda tensor: torch.linalg.inv_ex(tensor + torch.eye(4, device=tensor.device)),
    "checked inverse": lambda tensor: torch.linalg.inv(tensor + torch.eye(4, device=tensor.device)),
    "cholesky": lambda tensor: torch.linalg.cholesky(torch.eye(4, device=tensor.device)),
    "eigenvalues": lambda tensor: torch.linalg.eigvalsh(tensor),
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "stream query": lambda tensor: torch.cuda.current_stream().query(),
    "event": lambda tensor: torch.cuda.Event().record(),
    "event query": lambda tensor: recorded_event().query(),
    "memory summary": lambda tensor: torch.cuda.mem_get_info()[1] > 0,
    "empty_cache": lambda tensor: torch.cuda.empty_cache(),
    "another capture": lambda tensor: torch.cuda.CUDAGraph().capture_begin(),
    "another stream": lambda tensor: on_another_stream(tensor),
    "attention": lambda tensor: functional.scaled_dot_product_attention(tensor[None], tensor[None], tensor[None]),
    "cross_entropy": lambda tensor: functional.cross_entropy(tensor, tensor[0].long().clamp(max=3)),
    "ctc_loss": lambda tensor: functional.ctc_loss(
        tensor[:, None].log_softmax(-1), torch.ones(1, 2, dtype=torch.int64), torch.tensor([4]), torch.tensor([2])
    ),
    "foreach norm": lambda tensor: torch._foreach_norm([tensor, tensor]),
    "clip_grad_norm": lambda tensor: torch.nn.utils.clip_grad_norm_([parameter(tensor)], 1.0),
    "histc": lambda tensor: tensor.histc(4),
    "median": lambda tensor: tensor.median(),
    "mode": lambda tensor: tensor.mode(),
    "cumsum": lambda tensor: tensor.cumsum(0),
    "scatter_add": lambda tensor: tensor.scatter_add(0, tensor.long().clamp(max=3), tensor),
    "embedding_bag": lambda tensor: functional.embedding_bag(tensor.long().clamp(max=3), tensor),
}


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def on_another_stream(tensor: torch.Tensor) -> None:
    """Uses another stream without an event that would add it to the capture."""
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor + 1


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(tensor)
    made.grad = torch.ones_like(tensor)
    return made


def _enter(label: str, action: Callable[[torch.Tensor], Any]) -> None:
    def function(world: World) -> Observations:
        world.start()
        tensor = torch.ones(4, 4, device=world.device)
        return {"before": attempt(lambda: action(tensor)), "captured": during_capture(lambda: action(tensor))}

    function.__name__ = label.replace(" ", "_").replace(",", "")
    behaviour(own_process=True)(function)


for _label, _action in ACTIONS.items():
    _enter(_label, _action)
