"""Runs chunks of layers in an order, as a rank of a pipeline does, and records all that it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpu_support import torch

BATCH = 4


class Results(NamedTuple):
    """What a step has computed, as copies: outputs and input gradients by entry of the order, then the gradients of all
    parameters."""

    passes: list[Any]
    gradients: list[Any]


def block(width: int, dropout: float = 0.0) -> Any:
    """A layer with a residual connection, a normalisation and two matrices."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    return Block().cuda()


def chunks_of_blocks(chunks: int, layers: int, width: int = 16, dropout: float = 0.0) -> list[list[Any]]:
    torch.manual_seed(chunks * 100 + layers)
    return [[block(width, dropout) for _ in range(layers)] for _ in range(chunks)]


def sample_of(width: int = 16) -> Any:
    return torch.randn(BATCH, width, device="cuda", requires_grad=True)


def numbers(seed: int, width: int = 16) -> Any:
    """Numbers that depend on the seed only."""
    return torch.arange(seed, seed + BATCH * width, device="cuda", dtype=torch.float32).reshape(BATCH, width).sin()


def run_order(
    layers: Sequence[Sequence[Callable[[Any], Any]]], order: Sequence[int], parameters: Sequence[Any], width: int = 16
) -> Results:
    """Runs one step. Inputs of forwards and gradients of backwards depend on the position in the order. Parameters
    accumulate gradients over the step."""
    for parameter in parameters:
        parameter.grad = None
    inputs: dict[int, list[Any]] = {}
    outputs: dict[int, list[Any]] = {}
    found = []
    for position, entry in enumerate(order):
        chunk = abs(entry) - 1
        if entry > 0:
            given = x = numbers(position, width).requires_grad_() * 1.0  # no leaf
            x.retain_grad()
            for layer in layers[chunk]:
                x = layer(x)
            inputs.setdefault(chunk, []).append(given)
            outputs.setdefault(chunk, []).append(x)
            found.append(x.detach().clone())
        else:
            given, result = inputs[chunk].pop(0), outputs[chunk].pop(0)
            torch.autograd.backward(result, numbers(1000 + position, width))
            found.append(given.grad.clone())
    return Results(found, [parameter.grad.clone() for parameter in parameters])


def assert_equal(found: Results, expected: Results) -> None:
    """Compares bit for bit."""
    for position, (mine, theirs) in enumerate(zip(found.passes, expected.passes, strict=True)):
        assert torch.equal(mine, theirs), f"entry {position} of the order"
    for number, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert torch.equal(mine, theirs), f"gradient of parameter {number}"
