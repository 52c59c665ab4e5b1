"""Errors that the device detects, and accesses to released memory.

These are stream errors, after which a process can no longer use the device. So each case runs in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, attempt


def places(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


#: Actions on a matrix of 4 by 4 that fail on the device.
ASSERTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "embedding": lambda tensor: functional.embedding(places(9), tensor),
    "gather": lambda tensor: tensor.gather(0, places(9, 9)[None]),
    "index_select": lambda tensor: tensor.index_select(0, places(9)),
    "indices": lambda tensor: tensor[places(9)],
    "negative indices": lambda tensor: tensor[places(-5)],
    "assignment": lambda tensor: tensor.index_put_((places(9),), tensor[0]),
    "scatter": lambda tensor: tensor.scatter(0, places(9)[None], 1.0),
    "take": lambda tensor: tensor.take(places(99)),
    "nll_loss": lambda tensor: functional.nll_loss(tensor, places(9, 0, 0, 0)),
    "one_hot": lambda tensor: functional.one_hot(places(9), 4),
    "multinomial": lambda tensor: (-tensor).multinomial(1),
    "bincount": lambda tensor: places(-1).bincount(),
    "bernoulli": lambda tensor: (tensor * 2).bernoulli(),
    "division of integers": lambda tensor: places(1) // places(0),
    "assert": lambda tensor: torch._assert_async(places(0)),
}


def _enter_assertion(label: str, action: Callable[[torch.Tensor], Any]) -> None:
    def function(world: World) -> Observations:
        world.start()
        tensor = torch.ones(4, 4, device=world.device)
        torch.cuda.synchronize()
        return {"it": attempt(lambda: action(tensor)), "afterwards": attempt(lambda: (tensor + 1).sum().item())}

    function.__name__ = "assertion_" + label.replace(" ", "_")
    behaviour(own_process=True)(function)


for _label, _action in ASSERTIONS.items():
    _enter_assertion(_label, _action)


#: Actions on memory that a pause has released.
USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "operator": lambda tensor: tensor + 1,
    "in place": lambda tensor: tensor.add_(1),
    "fill": lambda tensor: tensor.fill_(1),
    "copy to the host": lambda tensor: tensor.cpu(),
    "copy from the host": lambda tensor: tensor.copy_(torch.ones(4, 4)),
    "copy on the device": lambda tensor: tensor.clone(),
    "item": lambda tensor: tensor[0, 0].item(),
    "matmul": lambda tensor: tensor @ torch.ones(4, 4, device="cuda"),
    "result": lambda tensor: torch.add(torch.ones(4, 4, device="cuda"), 1, out=tensor),
    "views": lambda tensor: tensor.t()[1:].shape,
    "release": lambda tensor: tensor.set_(),
}


def _enter_use(label: str, action: Callable[[torch.Tensor], Any]) -> None:
    def function(world: World) -> Observations:
        from torch_memory_saver import torch_memory_saver

        world.start()
        other = torch.ones(4, 4, device=world.device)
        with torch_memory_saver.region(tag="paused"):
            tensor = torch.ones(4, 4, device=world.device)
        torch_memory_saver.pause("paused")
        return {"it": attempt(lambda: action(tensor)), "afterwards": attempt(lambda: (other + 1).sum().item())}

    function.__name__ = "paused_" + label.replace(" ", "_")
    behaviour(own_process=True)(function)


for _label, _action in USES.items():
    _enter_use(_label, _action)
