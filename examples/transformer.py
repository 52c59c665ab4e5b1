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
    vocab_size: int = 512
    max_length: int = 16  # of a sequence, in tokens


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Run the block. `mask` marks the keys to attend to. With a cache, `hidden` is the token at the cache's position."""
        parts = self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            keys, values, position = cache
            key, value = keys.index_copy_(2, position, key), values.index_copy_(2, position, value)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        attended = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ value
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.max_length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each token of the sequences."""
        positions = torch.arange(sequences.shape[1], device=sequences.device)
        hidden = self.token_embedding(sequences) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden, positions <= positions[:, None])
        return self.head(self.norm(hidden))

    def cache_sizes(self, sequences: int) -> tuple[int, ...]:
        """Return the shape of a KV cache: layers, keys and values, sequences, heads, tokens, and the width of a head."""
        shape = self.shape
        return (shape.layers, 2, sequences, shape.heads, shape.max_length, shape.width // shape.heads)

    def decode(self, tokens: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each of `tokens`, which are at `position` of their sequences."""
        hidden = self.token_embedding(tokens[:, None]) + self.position_embedding(position)
        mask = torch.arange(self.shape.max_length, device=tokens.device) <= position
        for block, layer in zip(self.blocks, cache, strict=True):
            hidden = block(hidden, mask, (*layer, position))
        return self.head(self.norm(hidden))[:, 0]
