"""The model of partial_cuda_graph.py: a transformer with experts, in which everything but the experts can be captured.

Each operation is deterministic: a run with graphs must have the losses of a run without them, bit for bit. So the model has
no operation whose backward adds to one place from several threads, as the backward of an embedding or of gather() may do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_memory_saver.layer_graphs import graph_part

SCOPE = ("attn", "moe_router", "moe_preprocess")
#: The number of experts that process each token.
CHOSEN_EXPERTS = 2


@dataclass(frozen=True)
class Shape:
    width: int
    length: int
    """The number of tokens of a micro-batch, which is one sequence."""
    layers: int
    experts: int = 4
    heads: int = 4


class Norm(nn.Module):
    """RMSNorm, written as separate operations, as in many models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Permute(torch.autograd.Function):
    """A permutation of rows. Its gradient is the inverse permutation, where index_select() would add to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class Experts(nn.Module):
    """A matrix for each expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(shape.experts, shape.width, shape.width) / shape.width**0.5)

    def forward(self, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Run the experts. `tokens` are sorted by expert, and `sizes` has the number of tokens of each expert."""
        parts = zip(tokens.split(sizes), self.matrices.unbind(), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])


class Dispatcher:
    """The state of a layer for routing its tokens to the experts. As in frameworks, it is not a module."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        """The number of tokens of each expert, in each forward."""

    def sort(self, chosen: torch.Tensor, experts: int) -> None:
        """Sort the tokens by expert. The tensors that this sets become results of the graph."""
        self.order = torch.argsort(chosen, stable=True)
        self.inverse = torch.argsort(self.order)
        self.counts = (chosen == torch.arange(experts, device=chosen.device)[:, None]).sum(1)

    def sizes(self) -> list[int]:
        """Return the number of tokens of each expert. This waits for the GPU."""
        sizes: list[int] = self.counts.tolist()
        self.seen.append(tuple(sizes))
        return sizes


class Layer(nn.Module):
    """Attention and experts. The code is the same whether the parts run or are replayed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.shape = shape
        self.before_attention, self.before_experts = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query_norm, self.key_norm = Norm(head), Norm(head)
        self.gate = nn.Linear(width, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.dispatcher = Dispatcher()
        angles = torch.arange(shape.length)[:, None] / 10_000 ** (torch.arange(0, head, 2) / head)
        self.register_buffer("cosine", angles.cos().repeat(1, 2))
        self.register_buffer("sine", angles.sin().repeat(1, 2))
        self.register_buffer("unseen", torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(hidden)
        normed, weights, chosen = self.route(hidden)
        tokens = self.preprocess(normed, weights, chosen)
        # From here on the sizes differ in each micro-batch.
        results = self.experts(tokens, self.dispatcher.sizes())
        results = Permute.apply(results, self.dispatcher.inverse, self.dispatcher.order)
        return hidden + results.unflatten(0, (-1, CHOSEN_EXPERTS)).sum(1)

    @graph_part("attn")
    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before_attention(hidden)).unflatten(-1, (3, self.shape.heads, -1))
        query, key, value = heads.permute(1, 2, 0, 3)
        query, key = self.rotate(self.query_norm(query)), self.rotate(self.key_norm(key))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        mixed = scores.masked_fill(self.unseen, float("-inf")).softmax(-1) @ value
        return hidden + self.out(mixed.transpose(0, 1).flatten(1))

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Apply the rotary position embedding."""
        first, second = heads.chunk(2, -1)
        return heads * self.cosine + torch.cat([-second, first], -1) * self.sine

    @graph_part("moe_router")
    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the normalised tokens, and the weights and numbers of the experts of each token."""
        normed = self.before_experts(hidden)
        weights, chosen = self.gate(normed).softmax(-1).topk(CHOSEN_EXPERTS)
        return normed, weights / weights.sum(-1, keepdim=True), chosen

    @graph_part("moe_preprocess")
    def preprocess(self, normed: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return a weighted copy of each token for each of its experts, sorted by expert."""
        self.dispatcher.sort(chosen.flatten(), self.shape.experts)
        copies = (normed[:, None] * weights[:, :, None]).flatten(0, 1)
        return Permute.apply(copies, self.dispatcher.order, self.dispatcher.inverse)


class Head(nn.Module):
    """The last layer. It has no parts, and is captured as a whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.out = Norm(shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(hidden))


def make_layers(shape: Shape) -> list[nn.Module]:
    """Make the layers of the whole model, on the host. Equal shapes give equal parameters."""
    torch.manual_seed(0)
    return [*(Layer(shape) for _ in range(shape.layers)), Head(shape)]


def make_batch(shape: Shape, *numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the input of a micro-batch and its target, on the GPU. Equal numbers give equal values."""
    source = torch.Generator().manual_seed(hash(numbers))
    values = torch.randn(shape.length, shape.width, generator=source)
    return values.cuda(), values.roll(1, 0).cuda()


def loss_of(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is dense. The gradient of a plain mean() has stride 0, and graphs would get a dense copy,
    for which cuBLAS may choose another kernel."""
    return (result - wanted).square().mean()


def seen_by(layers: Iterable[nn.Module], forwards: int) -> list[tuple[int, ...]]:
    """Return the number of tokens of each expert of all layers, in each of the last forwards."""
    by_layer = [layer.dispatcher.seen[-forwards:] for layer in layers if isinstance(layer, Layer)]
    return [sum(of_forward, ()) for of_forward in zip(*by_layer, strict=True)]
