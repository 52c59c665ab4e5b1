"""Qwen2.5-32B with an eighth of each width: hidden size, intermediate size, head size and vocabulary. So matrices have a
64th of the parameters. Layers and heads are as many as the model has. Positions are left out: they have no parameters.

`Model` is what the trainer shards. `Engine` is one half of a tensor-parallel replica.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

HIDDEN, INTERMEDIATE, WORDS = 640, 3456, 19008
LAYERS, HEADS, KV_HEADS, HEAD = 64, 40, 8, 16
EPSILON = 1e-6
#: Tensor parallelism of the engine.
PARTS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, EPSILON)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.wide_norm = nn.RMSNorm(HIDDEN, EPSILON)
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        query, key, value = (part(normal).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
        normal = self.wide_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPSILON)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def split_of(name: str) -> int | None:
    """The dimension in which the halves of a replica split a parameter; None if both have all of it."""
    if "norm" in name:
        return None
    return 1 if name.endswith(("o.weight", "down.weight")) else 0


class Engine:
    """One half of a replica: its weights, and a decode step whose halves are summed over `group`."""

    def __init__(self, part: int, group: dist.ProcessGroup) -> None:
        self.part, self.group = part, group
        with torch.device("meta"):
            whole = dict(Model().named_parameters())
        self.weights = {
            name: torch.empty(self.mine(name, tensor).shape, dtype=torch.bfloat16, device="cuda")
            for name, tensor in whole.items()
        }

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        split = split_of(name)
        return whole if split is None else whole.chunk(PARTS, split)[self.part]

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.weights["words.weight"]
        local = tokens - self.part * len(table)
        inside = (local >= 0) & (local < len(table))
        return self.summed(F.embedding(local.clamp(0, len(table) - 1), table) * inside[:, None])

    def decode(self, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """This half's logits after `tokens`. `slots` are each sequence's tokens in the cache; the last one is new."""
        hidden = self.embedded(tokens)
        for number in range(LAYERS):
            hidden = self.layer(f"layers.{number}.", hidden, cache[number], slots)
        return F.linear(self.normal("norm.weight", hidden), self.weights["head.weight"]).float()

    def normal(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (HIDDEN,), self.weights[name], EPSILON)

    def layer(self, name: str, hidden: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        def weight(part: str) -> torch.Tensor:
            return self.weights[name + part]

        normal = self.normal(f"{name}norm.weight", hidden)
        query, key, value = (
            F.linear(normal, weight(f"{part}.weight"), weight(f"{part}.bias")).unflatten(-1, (-1, HEAD)) for part in "qkv"
        )
        for kept, new in zip(cache, (key, value), strict=True):
            kept.index_copy_(0, slots[:, -1], new)
        keys, values = (kept[slots].transpose(1, 2) for kept in cache)
        mixed = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        hidden = hidden + self.summed(F.linear(mixed.flatten(1), weight("o.weight")))
        normal = self.normal(f"{name}wide_norm.weight", hidden)
        wide = F.silu(F.linear(normal, weight("gate.weight"))) * F.linear(normal, weight("up.weight"))
        return hidden + self.summed(F.linear(wide, weight("down.weight")))
