"""Draws docs/images/demo.svg: the chart that ``python -m torch_memory_saver demo`` prints, on the simulated GPU.

    python docs/draw_demo.py

Runs the demo of the package that is imported, and needs nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parent / "images" / "demo.svg"

_COLORS = {"weights": "#2b6cb0", "kv_cache": "#63a4d8", "trainer": "#c8874a", "other": "#a0aec0"}
_CAPTIONS = {
    "generate": "the engine generates",
    "paused": "everything is paused",
    "train": "the trainer has the memory",
    "wake weights": "weights wake up first",
    "generate again": "the trainer is gone, the cache is back",
}
_WIDTH, _LEFT, _BAR, _ROW, _TOP = 900, 130, 420, 40, 58
_INK, _GRID = "#4a5568", "#e2e8f0"
_LINE = re.compile(r"^  (\S.*?) +\|([#=+. ]+)\| +(\d+ MiB)$", re.MULTILINE)
_LEGEND = re.compile(r"([#=+.]) (\w+)")


class Stage(NamedTuple):
    """One line of the chart: where each kind of memory ends, as a part of the whole."""

    name: str
    ends: list[tuple[str, float]]
    amount: str


def stages(printed: str) -> list[Stage]:
    """Return the stages in the demo's chart, which has no Unicode characters."""
    kinds = dict(_LEGEND.findall(printed.splitlines()[-3]))
    found = []
    for name, cells, amount in _LINE.findall(printed):
        ends, drawn = [], cells.rstrip()
        for glyph, kind in kinds.items():
            ends.append((kind, (drawn.rindex(glyph) + 1) / len(cells) if glyph in drawn else 0.0))
        found.append(Stage(name, ends, amount))
    return found


def draw(rows: list[Stage]) -> str:
    """The picture as SVG."""
    height = _TOP + _ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="20" y="24" font-size="15">Memory of one GPU in a step of reinforcement learning</text>',
    ]
    x = _LEFT
    for kind, color in _COLORS.items():
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="47">{kind}</text>')
        x += 110
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">{row.name}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 6}" width="{_BAR}" height="24" fill="{_GRID}"/>')
        start = 0.0
        for kind, end in row.ends:
            if end > start:
                place = f'x="{_LEFT + _BAR * start:.1f}" width="{_BAR * (end - start):.1f}"'
                parts.append(f'<rect {place} y="{y + 6}" height="24" fill="{_COLORS[kind]}"/>')
                start = end
        caption = f"{row.amount}: {_CAPTIONS[row.name]}"
        parts.append(f'<text x="{_LEFT + _BAR + 12}" y="{y + 22}">{caption}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    command = [sys.executable, "-m", "torch_memory_saver", "demo", "--device", "simulated", "--ascii"]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, check=True, capture_output=True, text=True)
    PICTURE.write_text(draw(stages(done.stdout)), encoding="utf-8")


if __name__ == "__main__":
    main()
