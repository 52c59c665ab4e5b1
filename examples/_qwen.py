"""Qwen2.5-32B: its sizes, a model to train, and one part of a tensor-parallel engine. Positions are left out: they have no
parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes, by default those of https://huggingface.co/Qwen/Qwen2.5-32B, whose embeddings are not tied."""

    hidden: int = 5120
    intermediate: int = 27648
    words: int = 152064
    layers: int = 64
    heads: int = 40
    kv_heads: int = 8

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def divided(self, number: int) -> Shape:
        """Return the shape with widths divided by a number: matrices have as many parameters, divided by its square."""
        return replace(
            self, hidden=self.hidden // number, intermediate=self.intermediate // number, words=self.words // number
        )

    @property
    def layer_parameters(self) -> int:
        keys = self.kv_heads * self.head
        attention = 2 * self.hidden * self.hidden + self.hidden + 2 * (keys * self.hidden + keys)
        return attention + 3 * self.intermediate * self.hidden + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return 2 * self.words * self.hidden + self.hidden + self.layers * self.layer_parameters


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        keys = shape.kv_heads * shape.head
        self.norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.k = nn.Linear(shape.hidden, keys)
        self.v = nn.Linear(shape.hidden, keys)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wide_norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        query, key, value = (
            part(normal).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
        normal = self.wide_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.head = nn.Linear(shape.hidden, shape.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def part_of(name: str, whole: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """Return one part's share of a weight. Norms are whole in each part."""
    if "norm" in name:
        return whole
    dimension = 1 if name.endswith(("o.weight", "down.weight")) else 0
    return whole.chunk(parts, dimension)[part]


class Engine:
    """One part of a replica: its weights, and a decode step whose parts are summed over `group`."""

    def __init__(self, shape: Shape, part: int, parts: int, group: dist.ProcessGroup) -> None:
        self.shape, self.part, self.parts, self.group = shape, part, parts, group
        with torch.device("meta"):
            self.whole = dict(Model(shape).named_parameters())
        self.weights = {
            name: torch.empty(self.mine(name, tensor).shape, dtype=torch.bfloat16, device="cuda")
            for name, tensor in self.whole.items()
        }

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return part_of(name, whole, self.part, self.parts)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.weights["words.weight"]
        local = tokens - self.part * len(table)
        inside = (local >= 0) & (local < len(table))
        return self.summed(F.embedding(local.clamp(0, len(table) - 1), table) * inside[:, None])

    def decode(self, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return this part's logits after `tokens`. `slots` are each sequence's tokens in the cache; the last one is new."""
        hidden = self.embedded(tokens)
        for number in range(self.shape.layers):
            hidden = self.layer(f"layers.{number}.", hidden, cache[number], slots)
        return F.linear(self.normal("norm.weight", hidden), self.weights["head.weight"]).float()

    def normal(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.shape.hidden,), self.weights[name], EPSILON)

    def layer(self, name: str, hidden: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        def weight(part: str) -> torch.Tensor:
            return self.weights[name + part]

        normal = self.normal(f"{name}norm.weight", hidden)
        query, key, value = (
            F.linear(normal, weight(f"{part}.weight"), weight(f"{part}.bias")).unflatten(-1, (-1, self.shape.head))
            for part in "qkv"
        )
        for kept, new in zip(cache, (key, value), strict=True):
            kept.index_copy_(0, slots[:, -1], new)
        keys, values = (kept[slots].transpose(1, 2) for kept in cache)
        mixed = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        hidden = hidden + self.summed(F.linear(mixed.flatten(1), weight("o.weight")))
        normal = self.normal(f"{name}wide_norm.weight", hidden)
        wide = F.silu(F.linear(normal, weight("gate.weight"))) * F.linear(normal, weight("up.weight"))
        return hidden + self.summed(F.linear(wide, weight("down.weight")))
