"""The model of partial_cuda_graph.py: a transformer with experts, in which everything but the experts can be captured.

Each operation is deterministic: a run with graphs must have the losses of a run without them, bit for bit. So the model has
no operation whose backward adds to one place from several threads, as the backward of an embedding or of gather() may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_memory_saver.layer_graphs import graph_part

SCOPE = ("attn", "moe_router", "moe_preprocess")
#: The number of experts that process each token.
CHOSEN_EXPERTS = 2


@dataclass(frozen=True)
class Shape:
    width: int
    length: int
    """Tokens of a micro-batch: one sequence."""
    layers: int
    experts: int
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


class GroupedLinear(torch.autograd.Function):
    """A product of each group of rows with the group's matrix. `groups` has, for each group in turn, the number of its rows
    and the index of its matrix."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups = groups
        results = torch.empty_like(rows)
        for (begin, end), matrix in spans(groups):
            torch.mm(rows[begin:end], matrices[matrix], out=results[begin:end])
        return results

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, matrices = ctx.saved_tensors
        of_rows, of_matrices = torch.empty_like(rows), torch.zeros_like(matrices)
        for (begin, end), matrix in spans(ctx.groups):
            torch.mm(gradient[begin:end], matrices[matrix].t(), out=of_rows[begin:end])
            of_matrices[matrix].addmm_(rows[begin:end].t(), gradient[begin:end])
        return of_rows, of_matrices, None


def spans(groups: Sequence[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], int]]:
    """Return, for each group that is not empty, its first row, the row after its last, and its matrix."""
    ends = accumulate(rows for rows, _ in groups)
    return [((end - rows, end), matrix) for end, (rows, matrix) in zip(ends, groups, strict=True) if rows]


class AllToAll(torch.autograd.Function):
    """A function that sends each rank of the group its part of the rows. The gradient is sent back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.way_back = received, sent, group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(gradient, *ctx.way_back), None, None, None


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class Experts(nn.Module):
    """A matrix for each expert. If there is a group, each of its ranks has an equal part of the matrices."""

    def __init__(self, shape: Shape, group: Any = None) -> None:
        super().__init__()
        matrices = torch.randn(shape.experts, shape.width, shape.width) / shape.width**0.5
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        self.matrices = nn.Parameter(matrices.chunk(self.ranks)[rank].clone())

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, note: Callable[[list[int]], None]) -> torch.Tensor:
        """
        Args:
            tokens: The tokens, sorted by expert.
            counts: The number of tokens of each expert, on the GPU.
            note: A function that is called with the counts on the host.
        """
        if self.group is None:
            sizes = counts.tolist()  # waits for the GPU
            note(sizes)
            return GroupedLinear.apply(tokens, self.matrices, [(rows, number) for number, rows in enumerate(sizes)])
        even = [len(self.matrices)] * self.ranks
        sizes, others = torch.stack([counts, exchange(counts, even, even, self.group)]).tolist()
        note(sizes)
        sent, received = (sums(each, len(self.matrices)) for each in (sizes, others))
        groups = [(rows, number % len(self.matrices)) for number, rows in enumerate(others)]
        arrived = AllToAll.apply(tokens, sent, received, self.group)
        return AllToAll.apply(GroupedLinear.apply(arrived, self.matrices, groups), received, sent, self.group)


def sums(numbers: list[int], size: int) -> list[int]:
    """Return the sums of consecutive groups of `size` numbers."""
    return [sum(numbers[begin : begin + size]) for begin in range(0, len(numbers), size)]


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

    def note(self, sizes: list[int]) -> None:
        self.seen.append(tuple(sizes))


class Layer(nn.Module):
    """Attention and experts. The code is the same whether the parts run or are replayed."""

    def __init__(self, shape: Shape, group: Any = None) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.shape = shape
        self.before_attention, self.before_experts = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query_norm, self.key_norm = Norm(head), Norm(head)
        self.gate = nn.Linear(width, shape.experts, bias=False)
        self.experts = Experts(shape, group)
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
        dispatcher = self.dispatcher
        results = self.experts(tokens, dispatcher.counts, dispatcher.note)
        results = Permute.apply(results, dispatcher.inverse, dispatcher.order)
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


def make_layers(shape: Shape, group: Any = None) -> list[nn.Module]:
    """Make the layers of the whole model, on the host. Equal shapes give equal parameters."""
    torch.manual_seed(0)
    return [*(Layer(shape, group) for _ in range(shape.layers)), Head(shape)]


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
