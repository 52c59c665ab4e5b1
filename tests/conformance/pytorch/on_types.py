"""Operators and element types: unsupported types, and the type of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, each

TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def by_type(world: World, action: Callable[[torch.Tensor], Any]) -> Observations:
    """The behaviour of the action with a matrix of each type."""

    def act(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: action(torch.ones(2, 2, device=world.device).to(dtype))

    return each({str(dtype).removeprefix("torch."): act(dtype) for dtype in TYPES})


ACTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda tensor: tensor + tensor,
    "subtract": lambda tensor: tensor - tensor,
    "divide": lambda tensor: tensor / tensor,
    "divide by a number": lambda tensor: tensor / 2,
    "floor_divide": lambda tensor: tensor // tensor,
    "remainder": lambda tensor: tensor % tensor,
    "power": lambda tensor: tensor**2,
    "negate": lambda tensor: -tensor,
    "invert": lambda tensor: ~tensor,
    "and": lambda tensor: tensor & tensor,
    "shift": lambda tensor: tensor << 1,
    "less": lambda tensor: tensor < tensor,
    "sqrt": lambda tensor: tensor.sqrt(),
    "sqrt in place": lambda tensor: tensor.sqrt_(),
    "exp": lambda tensor: tensor.exp(),
    "floor": lambda tensor: tensor.floor(),
    "clamp": lambda tensor: tensor.clamp(0, 1),
    "abs": lambda tensor: tensor.abs(),
    "sum": lambda tensor: tensor.sum(),
    "mean": lambda tensor: tensor.mean(),
    "std": lambda tensor: tensor.std(),
    "max": lambda tensor: tensor.max(),
    "argmax": lambda tensor: tensor.argmax(),
    "cumsum": lambda tensor: tensor.cumsum(0),
    "sort": lambda tensor: tensor.sort(),
    "topk": lambda tensor: tensor.topk(1),
    "unique": lambda tensor: tensor.unique(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "matmul": lambda tensor: tensor @ tensor,
    "bmm": lambda tensor: tensor[None].bmm(tensor[None]),
    "inverse": lambda tensor: torch.linalg.inv(tensor),
    "softmax": lambda tensor: tensor.softmax(0),
    "layer_norm": lambda tensor: functional.layer_norm(tensor, (2,)),
    "gelu": lambda tensor: functional.gelu(tensor),
    "relu": lambda tensor: functional.relu(tensor),
    "dropout": lambda tensor: functional.dropout(tensor, 0.5, True),
    "conv1d": lambda tensor: functional.conv1d(tensor[None], tensor[None]),
    "attention": lambda tensor: functional.scaled_dot_product_attention(tensor[None], tensor[None], tensor[None]),
    "as an index": lambda tensor: torch.ones(4, device=tensor.device)[tensor],
    "embedding": lambda tensor: functional.embedding(tensor, torch.ones(4, 2, device=tensor.device)),
    "gather": lambda tensor: tensor.gather(0, torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)),
    "index_add": lambda tensor: tensor.index_add(0, torch.zeros(2, dtype=torch.int64, device=tensor.device), tensor),
    "where": lambda tensor: torch.where(tensor > 0, tensor, tensor),
    "masked_fill": lambda tensor: tensor.masked_fill(tensor, 1),
    "fill": lambda tensor: tensor.fill_(1),
    "uniform": lambda tensor: tensor.uniform_(),
    "random": lambda tensor: tensor.random_(),
    "bernoulli": lambda tensor: tensor.bernoulli_(0.5),
    "multinomial": lambda tensor: tensor.multinomial(1),
    "bincount": lambda tensor: tensor[0].bincount(),
    "histc": lambda tensor: tensor.histc(),
    "cat": lambda tensor: torch.cat([tensor, tensor]),
    "cat with float32": lambda tensor: torch.cat([tensor, torch.ones(2, 2, device=tensor.device)]),
    "foreach add": lambda tensor: torch._foreach_add([tensor], 1),
    "foreach norm": lambda tensor: torch._foreach_norm([tensor]),
}


def _enter(label: str, action: Callable[[torch.Tensor], Any]) -> None:
    def function(world: World) -> Observations:
        return by_type(world, action)

    function.__name__ = label.replace(" ", "_")
    behaviour(function)


for _label, _action in ACTIONS.items():
    _enter(_label, _action)


@behaviour
def mixed(world: World) -> Observations:
    def ones(dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(2, 2, device=world.device).to(dtype)

    wide, half, whole, brain = (ones(each) for each in (torch.float32, torch.float16, torch.int64, torch.bfloat16))
    targets = torch.zeros(2, dtype=torch.int32, device=world.device)
    return each(
        {
            "add": lambda: half + brain,
            "add of integers": lambda: half + whole,
            "add of fp8": lambda: ones(torch.float8_e4m3fn) + wide,
            "integer += float": lambda: whole.add_(wide),
            "bool += integer": lambda: ones(torch.bool).add_(whole),
            "matmul": lambda: wide @ half,
            "linear": lambda: functional.linear(wide, half),
            "linear, bias": lambda: functional.linear(wide, wide, half[0]),
            "conv1d": lambda: functional.conv1d(wide[None], half[None]),
            "layer_norm": lambda: functional.layer_norm(half, (2,), wide[0], wide[0]),
            "cat": lambda: torch.cat([half, wide]),
            "where": lambda: torch.where(wide > 0, half, wide),
            "where, condition": lambda: torch.where(wide, wide, wide),
            "copy": lambda: whole.copy_(wide),
            "index_add": lambda: wide.index_add(0, targets, half),
            "index_copy": lambda: wide.index_copy(0, targets.long(), half),
            "scatter": lambda: wide.scatter(0, whole, half),
            "gather": lambda: wide.gather(0, targets[None]),
            "index_put": lambda: wide.index_put((targets.long(),), half[0]),
            "lerp": lambda: torch.lerp(wide, half, 0.5),
            "addcmul": lambda: torch.addcmul(wide, half, half),
            "nll_loss": lambda: functional.nll_loss(wide, targets),
            "mse_loss": lambda: functional.mse_loss(wide, half),
            "out=": lambda: torch.add(wide, wide, out=half),
            "out= of integers": lambda: torch.add(wide, wide, out=whole),
            "out= of mm": lambda: torch.mm(wide, wide, out=half),
            "attention": lambda: functional.scaled_dot_product_attention(wide[None], half[None], wide[None]),
            "foreach add": lambda: torch._foreach_add([wide], [half]),
        }
    )
