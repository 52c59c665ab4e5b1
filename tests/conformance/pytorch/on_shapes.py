"""Operators with arguments of incompatible shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from table import Observations, behaviour
from world import World, each


@behaviour
def broadcasting(world: World) -> Observations:
    four, three, matrix = (torch.ones(*shape, device=world.device) for shape in ((4,), (3,), (3, 4)))
    return each(
        {
            "add": lambda: four + three,
            "add in place, larger": lambda: four.add_(matrix),
            "where": lambda: torch.where(four > 0, three, four),
            "expand": lambda: three.expand(4),
            "copy": lambda: four.copy_(three),
            "masked_fill": lambda: four.masked_fill(three > 0, 1.0),
            "addcmul": lambda: torch.addcmul(four, three, three),
            "lerp": lambda: torch.lerp(four, three, 0.5),
        }
    )


@behaviour
def products(world: World) -> Observations:
    one, other, batch = (torch.ones(*shape, device=world.device) for shape in ((2, 3), (4, 5), (2, 3, 4)))
    return each(
        {
            "mm": lambda: one.mm(other),
            "matmul": lambda: one @ other,
            "mm of a vector": lambda: one.mm(other[0]),
            "mv": lambda: one.mv(other[0]),
            "dot": lambda: one[0].dot(other[0]),
            "bmm": lambda: batch.bmm(batch),
            "addmm": lambda: torch.addmm(other, one, one),
            "baddbmm": lambda: torch.baddbmm(batch, batch, batch),
            "linear": lambda: functional.linear(one, other),
            "linear, bias": lambda: functional.linear(one, torch.ones(7, 3, device=world.device), one[0]),
            "einsum": lambda: torch.einsum("ij,jk->ik", one, other),
            "inverse": lambda: torch.linalg.inv(one),
            "solve": lambda: torch.linalg.solve(other[:, :4], one),
        }
    )


@behaviour
def joining_and_cutting(world: World) -> Observations:
    one, other = torch.ones(2, 3, device=world.device), torch.ones(4, 5, device=world.device)
    return each(
        {
            "cat": lambda: torch.cat([one, other]),
            "cat of dimensions": lambda: torch.cat([one, other[0]]),
            "cat of nothing": lambda: torch.cat([]),
            "stack": lambda: torch.stack([one, other]),
            "view": lambda: one.view(4),
            "view of strides": lambda: one.t().view(6),
            "split": lambda: one.split([1, 2]),
            "select": lambda: one.select(0, 2),
            "narrow": lambda: one.narrow(1, 2, 2),
            "unfold": lambda: one.unfold(1, 4, 1),
            "permute": lambda: one.permute(0, 0),
            "repeat": lambda: one.repeat(2),
            "roll": lambda: one.roll(1, 2),
            "flip": lambda: one.flip(2),
        }
    )


@behaviour
def indices(world: World) -> Observations:
    matrix = torch.ones(3, 4, device=world.device)
    places = torch.zeros(2, 5, dtype=torch.int64, device=world.device)
    return each(
        {
            "gather": lambda: matrix.gather(0, places),
            "gather of dimensions": lambda: matrix.gather(0, places[0]),
            "scatter": lambda: matrix.scatter(1, places, matrix),
            "scatter_add": lambda: matrix.scatter_add(0, places, matrix),
            "index_select of dimensions": lambda: matrix.index_select(0, places),
            "index_add": lambda: matrix.index_add(0, places[0], matrix),
            "index_copy": lambda: matrix.index_copy(0, places[0], matrix),
            "mask": lambda: matrix[torch.ones(5, dtype=torch.bool, device=world.device)],
            "too many indices": lambda: matrix[places, places, places],
            "indices that do not broadcast": lambda: matrix[places[:, :3], places],
            "put": lambda: matrix.index_put((places[0],), places),
            "take_along_dim": lambda: torch.take_along_dim(matrix, places, 1),
        }
    )


@behaviour
def networks(world: World) -> Observations:
    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=world.device)

    targets = torch.zeros(3, dtype=torch.int64, device=world.device)
    return each(
        {
            "conv2d, channels": lambda: functional.conv2d(ones(1, 3, 8, 8), ones(4, 2, 3, 3)),
            "conv2d, kernel": lambda: functional.conv2d(ones(1, 3, 2, 2), ones(4, 3, 3, 3)),
            "conv2d, bias": lambda: functional.conv2d(ones(1, 3, 8, 8), ones(4, 3, 3, 3), ones(3)),
            "conv_transpose2d": lambda: functional.conv_transpose2d(ones(1, 3, 8, 8), ones(4, 2, 3, 3)),
            "max_pool2d": lambda: functional.max_pool2d(ones(1, 3, 2, 2), 3),
            "avg_pool2d": lambda: functional.avg_pool2d(ones(3), 2),
            "layer_norm": lambda: functional.layer_norm(ones(2, 4), (3,)),
            "layer_norm, weight": lambda: functional.layer_norm(ones(2, 4), (4,), ones(3)),
            "group_norm": lambda: functional.group_norm(ones(2, 4), 3),
            "batch_norm": lambda: functional.batch_norm(ones(2, 4), ones(3), ones(3)),
            "cross_entropy": lambda: functional.cross_entropy(ones(2, 4), targets),
            "nll_loss, dimensions": lambda: functional.nll_loss(ones(4), targets),
            "embedding": lambda: functional.embedding(targets, ones(4)),
            "attention": lambda: functional.scaled_dot_product_attention(
                ones(1, 2, 3, 4), ones(1, 2, 3, 5), ones(1, 2, 3, 4)
            ),
            "interpolate": lambda: functional.interpolate(ones(1, 1, 4, 4), size=(2,)),
            "pad": lambda: functional.pad(ones(3), (1, 1, 1)),
            "pixel_shuffle": lambda: functional.pixel_shuffle(ones(1, 3, 2, 2), 2),
            "mse_loss": lambda: functional.mse_loss(ones(3), ones(4)),
        }
    )


@behaviour
def dimensions(world: World) -> Observations:
    matrix, empty = torch.ones(3, 4, device=world.device), torch.ones(0, 3, device=world.device)
    return each(
        {
            "sum": lambda: matrix.sum(2),
            "softmax": lambda: matrix.softmax(-3),
            "cumsum": lambda: matrix.cumsum(2),
            "sort": lambda: matrix.sort(2),
            "topk": lambda: matrix.topk(5),
            "topk of nothing": lambda: matrix.topk(0),
            "max of nothing": lambda: empty.max(),
            "max of nothing, by dimension": lambda: empty.max(0),
            "mean of nothing": lambda: empty.mean(),
            "argmax of nothing": lambda: empty.argmax(),
            "median of nothing": lambda: empty.median(),
            "kthvalue": lambda: matrix.kthvalue(5),
            "norm": lambda: torch.linalg.vector_norm(matrix, dim=2),
            "cross": lambda: torch.linalg.cross(matrix, matrix),
            "diagonal": lambda: matrix.diagonal(dim1=1, dim2=1),
        }
    )
