"""Draws docs/images/package-layers.svg: the layers of the Python package, as import-linter checks them (pyproject.toml)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from layers_picture import INK, PAPER, QUIET, Box, draw_box, text

ROOT = Path(__file__).resolve().parents[1]
#: Contents of each part of the package, in a few words. A part without a line here is drawn with its name alone.
CONTENTS = {
    "_cli": "commands that need nothing else",
    "observe": "what only observes: memory, events, reports, commands",
    "_additions": "what is added to the saver",
    "_compat": "the C++ package's names",
    "vllm": "the plug-in of vLLM",
    "saver": "the public class",
    "_services": "what features may use",
    "_engine": "region, pause, resume, hooks, fork and exit",
    "_torch": "PyTorch: pools, captures, sharing, live blocks",
    "options": "what a call asks for",
    "reports": "what a call returns",
    "_simulate": "PyTorch on the simulated GPU",
    "_plot": "pictures of matplotlib",
    "_files": "files that are whole or do not exist",
    "_published": "names of the shared store",
    "_shared_folder": "the folder of the shared store",
    "_folders": "which folders are written to",
    "_core": "the native library",
    "errors": "every exception",
}
COLOURS = ("#0e7490", "#be123c", "#15803d", "#7e22ce", "#b45309", "#0f766e", "#1d4ed8", "#64748b")
WIDTH, HEIGHT, GAP, MARGIN = 760, 48, 14, 20
CAPTION = "A part imports only parts of lower rows. Features of a row do not import each other."


def layers(pyproject: str) -> list[list[str]]:
    """The rows from the highest to the lowest, each with the names of its parts."""
    block = re.search(r'type = "layers".*?\nlayers = \[\n(.*?)\n\]', pyproject, re.DOTALL)
    assert block is not None
    return [re.split(r" [|:] ", row) for row in re.findall(r'"([^"]+)"', block[1])]


def svg(rows: Sequence[Sequence[str]]) -> str:
    """The rows, one below the other."""
    height = MARGIN * 2 + len(rows) * (HEIGHT + GAP) + 12
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="The layers of the Python package">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
    ]
    for number, row in enumerate(rows):
        each = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            left, top = MARGIN + place * (each + GAP), MARGIN + number * (HEIGHT + GAP)
            words = CONTENTS.get(name, "") if len(row) < 4 else ""
            drawn.append(
                draw_box(Box(name, left, top, each, HEIGHT), COLOURS[number % len(COLOURS)] if words else INK, words)
            )
    drawn.append(text(WIDTH / 2, height - MARGIN + 2, CAPTION, QUIET, size=12))
    return "\n".join([*drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = svg(layers((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    (Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images" / "package-layers.svg").write_text(picture)
