"""A small bar chart of memory for the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO

from torch_memory_saver._text import binary_size

__all__ = ["can_draw_blocks", "draw"]

_BLOCKS = "█▓▒·"
_ASCII = "#=+."
_LARGEST_WIDTH = 100
_SMALLEST_BAR = 10


def can_draw_blocks(stream: TextIO) -> bool:
    """Whether the stream's encoding has the block characters."""
    try:
        _BLOCKS.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def draw(
    stages: Sequence[tuple[str, Mapping[str, int]]], capacity: int, ascii_only: bool, width: int | None = None
) -> list[str]:
    """One line for each stage, with a bar as long as the memory in use, and a legend.

    Args:
        stages: The name of each stage, and its bytes by category. There may be at most four categories in all.
        capacity: Bytes that a full bar stands for.
        width: Characters in a line (default: as the terminal has).
    """
    glyphs = _ASCII if ascii_only else _BLOCKS
    categories = list(dict.fromkeys(name for _, parts in stages for name in parts))
    width = min(width or shutil.get_terminal_size().columns, _LARGEST_WIDTH)
    label = max(len(name) for name, _ in stages)
    amount = max(len(binary_size(sum(parts.values()))) for _, parts in stages)
    cells = max(width - label - amount - 6, _SMALLEST_BAR)
    edge = "|" if ascii_only else "│"
    lines = []
    for name, parts in stages:
        bar, drawn, total = "", 0, 0
        for category, glyph in zip(categories, glyphs, strict=False):
            # Each part ends at the rounded sum so far, so that rounding errors do not add up.
            total += parts.get(category, 0)
            end = min(round(cells * total / capacity), cells)
            bar += glyph * (end - drawn)
            drawn = max(drawn, end)
        lines.append(f"{name:<{label}} {edge}{bar:<{cells}}{edge} {binary_size(sum(parts.values())):>{amount}}")
    legend = "   ".join(f"{glyph} {category}" for category, glyph in zip(categories, glyphs, strict=False))
    return [*lines, f"{'':<{label}}  {legend}"]
