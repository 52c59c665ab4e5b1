"""Random numbers: reproduction by seed and by state, and the independence of generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, attempt

ACTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda tensor: torch.rand_like(tensor),
    "randn": lambda tensor: torch.randn_like(tensor),
    "randint": lambda tensor: torch.randint_like(tensor, 100),
    "randperm": lambda tensor: torch.randperm(64, device=tensor.device),
    "dropout": lambda tensor: functional.dropout(tensor, 0.5, True),
    "bernoulli": lambda tensor: (tensor / 2).bernoulli(),
    "multinomial": lambda tensor: tensor.multinomial(4),
    "exponential": lambda tensor: torch.empty_like(tensor).exponential_(),
    "normal": lambda tensor: torch.normal(tensor, tensor),
}


@behaviour
def again(world: World) -> Observations:
    """Whether the same seed repeats the numbers, a second call gives others, and the restored state repeats the second."""
    tensor = torch.ones(8, 8, device=world.device)

    def compare(action: Callable[[torch.Tensor], Any]) -> list[bool]:
        torch.manual_seed(7)
        first = action(tensor)
        state = torch.cuda.get_rng_state()
        second = action(tensor)
        torch.cuda.set_rng_state(state)
        restored = action(tensor)
        torch.manual_seed(7)
        return [torch.equal(first, action(tensor)), torch.equal(first, second), torch.equal(second, restored)]

    return {label: attempt(lambda action=action: compare(action)) for label, action in ACTIONS.items()}


@behaviour
def generators(world: World) -> Observations:
    generator = torch.Generator(world.device).manual_seed(7)
    state = torch.cuda.get_rng_state()
    one = torch.rand(8, device=world.device, generator=generator)
    torch.manual_seed(7)
    return {
        "the default one is left alone": torch.equal(state, torch.cuda.get_rng_state()) or "changed by the seed",
        "as the default one": torch.equal(one, torch.rand(8, device=world.device)),
        "seed": generator.initial_seed(),
        "state": attempt(lambda: generator.get_state().shape),
        "a generator of the host": attempt(lambda: torch.rand(2, device=world.device, generator=torch.Generator())),
    }
