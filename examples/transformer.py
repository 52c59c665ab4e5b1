"""A causal transformer that is trained on whole sequences and decodes one token at a time with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

#: The keys and values of one layer, and the position of the next token.
Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int = 4
    heads: int = 4
    words: int = 512
    length: int = 16  # of a sequence, in tokens


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_wide = nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, seen: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Run the block. `seen` marks the keys that a token sees. With a cache, `hidden` is the token at its position."""
        parts = self.qkv(self.before_attention(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            keys, values, position = cache
            key, value = keys.index_copy_(2, position, key), values.index_copy_(2, position, value)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.before_wide(hidden))


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each token of the sequences."""
        places = torch.arange(sequences.shape[1], device=sequences.device)
        hidden = self.words(sequences) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden, places <= places[:, None])
        return self.head(self.norm(hidden))

    def cache_sizes(self, sequences: int) -> tuple[int, ...]:
        """Return the shape of a KV cache: layers, keys and values, sequences, heads, tokens, and the width of a head."""
        shape = self.shape
        return (shape.layers, 2, sequences, shape.heads, shape.length, shape.width // shape.heads)

    def decode(self, tokens: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each of `tokens`, which are at `position` of their sequences."""
        hidden = self.words(tokens[:, None]) + self.places(position)
        seen = torch.arange(self.shape.length, device=tokens.device) <= position
        for block, layer in zip(self.blocks, cache, strict=True):
            hidden = block(hidden, seen, (*layer, position))
        return self.head(self.norm(hidden))[:, 0]
