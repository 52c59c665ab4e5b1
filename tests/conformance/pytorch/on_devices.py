"""Operators whose arguments are on different devices."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, each


def between(here: torch.device, there: torch.device) -> Observations:
    """The behaviour of operators with an argument on another device."""
    one, other = torch.ones(2, 2, device=here), torch.ones(2, 2, device=there)
    places, number = torch.zeros(2, dtype=torch.int64, device=there), torch.ones((), device=there)
    place = torch.zeros((), dtype=torch.int64, device=there)
    return each(
        {
            "add": lambda: one + other,
            "add to": lambda: other + one,
            "add in place": lambda: one.add_(other),
            "add of a number": lambda: one + number,
            "add to a number": lambda: number + one,
            "add of a number in place": lambda: one.add_(number),
            "add to a number in place": lambda: number.add_(one),
            "less": lambda: one < number,
            "where": lambda: torch.where(one > 0, one, other),
            "where of a number": lambda: torch.where(one > 0, one, number),
            "masked_fill": lambda: one.masked_fill(other > 0, 1.0),
            "masked_fill with a number": lambda: one.masked_fill(one > 0, number),
            "addcmul of a number": lambda: torch.addcmul(one, one, number),
            "lerp by a number": lambda: torch.lerp(one, one, number),
            "clamp by a number": lambda: one.clamp(min=number),
            "power of a number": lambda: one**number,
            "matmul": lambda: one @ other,
            "linear": lambda: functional.linear(one, other),
            "linear, bias": lambda: functional.linear(one, one, other[0]),
            "cat": lambda: torch.cat([one, other]),
            "stack": lambda: torch.stack([one, other]),
            "copy": lambda: one.copy_(other),
            "fill": lambda: one.fill_(number),
            "out=": lambda: torch.add(one, one, out=other),
            "indices": lambda: one[places],
            "an index": lambda: one[place],
            "indices of an assignment": lambda: one.index_put_((places,), one[0]),
            "values of an assignment": lambda: one.index_put_((torch.zeros(2, dtype=torch.int64, device=here),), other[0]),
            "a number of an assignment": lambda: one.index_put_((torch.zeros(2, dtype=torch.int64, device=here),), number),
            "mask": lambda: one[other > 0],
            "masked_select": lambda: one.masked_select(other > 0),
            "index_select": lambda: one.index_select(0, places),
            "index_select by a number": lambda: one.index_select(0, place),
            "gather": lambda: one.gather(0, places[None]),
            "scatter": lambda: one.scatter(0, places[None], 1.0),
            "take": lambda: one.take(places),
            "take by a number": lambda: one.take(place),
            "embedding": lambda: functional.embedding(places, one),
            "embedding of a number": lambda: functional.embedding(place, one),
            "cross_entropy": lambda: functional.cross_entropy(one, places),
            "layer_norm": lambda: functional.layer_norm(one, (2,), other[0]),
            "attention": lambda: functional.scaled_dot_product_attention(one[None], other[None], one[None]),
            "bincount": lambda: torch.bincount(torch.zeros(2, dtype=torch.int64, device=here), other[0]),
            "searchsorted": lambda: torch.searchsorted(one[0], other),
            "foreach add": lambda: torch._foreach_add([one], [other]),
            "foreach multiply by a number": lambda: torch._foreach_mul([one], number),
            "generator": lambda: torch.rand(2, device=here, generator=torch.Generator(there)),
        }
    )


@behaviour
def host(world: World) -> Observations:
    return between(world.device, torch.device("cpu"))


@behaviour(devices=2)
def another_gpu(world: World) -> Observations:
    return between(world.device, torch.device("cuda", 1))


@behaviour(devices=2)
def current_device(world: World) -> Observations:
    """An operator runs on the device of its arguments, independent of the current device."""
    other = torch.ones(2, device="cuda:1")
    with torch.cuda.device(1):
        return each(
            {
                "operator": lambda: torch.ones(2, device=world.device) + 1,
                "factory": lambda: torch.ones(2, device="cuda"),
                "like": lambda: torch.empty_like(other),
                "random": lambda: torch.rand(2, device="cuda"),
            }
        )
