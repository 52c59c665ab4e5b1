"""Draws docs/images/example.svg: the memory in each stage that examples/tags.py prints, on the simulated GPU.

python docs/draw_example.py    # needs PyTorch's CUDA build
"""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "tags.py"
PICTURE = REPOSITORY / "docs" / "images" / "example.svg"

_WIDTH, _LEFT, _BAR, _ROW, _TOP = 900, 80, 280, 36, 40
_LINE = re.compile(r"^ *(\d+) MiB in use: (.*)$", re.MULTILINE)


def stages(printed: str) -> list[tuple[int, str]]:
    """Return the MiB and the name of each stage that an example has printed."""
    return [(int(size), name) for size, name in _LINE.findall(printed)]


def draw(rows: list[tuple[int, str]]) -> str:
    """The picture as SVG."""
    height = _TOP + _ROW * len(rows) + 8
    largest = max(size for size, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#4a5568">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="20" y="24" font-size="15">Device memory in use in each stage of examples/tags.py</text>',
    ]
    for index, (size, name) in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 18}" text-anchor="end">{size} MiB</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{_BAR}" height="24" fill="#e2e8f0"/>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{_BAR * size / largest:.1f}" height="24" fill="#2b6cb0"/>')
        parts.append(f'<text x="{_LEFT + _BAR + 12}" y="{y + 18}">{escape(name, quote=False)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    command = [
        sys.executable,
        "-m",
        "torch_memory_saver",
        "simulate",
        "--memory",
        "16GiB",
        "--",
        sys.executable,
        str(EXAMPLE),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    PICTURE.write_text(draw(stages(done.stdout)), encoding="utf-8")


if __name__ == "__main__":
    main()
