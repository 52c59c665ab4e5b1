"""Draws docs/images/performance.svg: how much of its limit each operation reaches, from the table of benchmarks/h200.md.

    python docs/draw_performance.py

Needs nothing but Python. tests/docs/test_pictures.py fails where the picture is not the table's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "benchmarks" / "h200.md"
PICTURE = REPOSITORY / "docs" / "images" / "performance.svg"

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 900, 300, 60, 54, 20
_LARGEST = 1.25
_OURS, _PEER, _INK, _GRID = "#2b6cb0", "#c8874a", "#4a5568", "#cbd5e0"
#: Rows that explain another one, or whose limit is not a speed.
_LEFT_OUT = re.compile(r"bare|staged|parity|at once|peak|after|both|without torch|torch imported")
_LEFT_OUT_CASES = ("region", "import", "allocate", "host-memory", "live", "two-gpus", "wake-up")
_MS = re.compile(r"([0-9.]+) ms")


class Bar(NamedTuple):
    """One operation: speed as a part of the limit's, ours and the C++ package's."""

    label: str
    ours: float
    peer: float | None


def bars() -> list[Bar]:
    """The rows of the table that hold a pause or a resume against a limit in milliseconds."""
    found, case = [], ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 8 or cells[0] in ("case", "---"):
            continue
        case = cells[0] or case
        time, limit, ratio, peer = (cells[2], cells[4], cells[5], cells[7])
        times = _MS.match(time), _MS.match(limit)
        if case.split(",")[0].removesuffix("-torch") in _LEFT_OUT_CASES or _LEFT_OUT.search(cells[1]):
            continue
        if times[0] is None or times[1] is None:
            continue
        part = float(ratio[:-1]) / 100 if ratio.endswith("%") else 1 / float(ratio.rstrip("x"))
        other = _MS.match(peer)
        found.append(Bar(f"{case}: {cells[1]}", part, float(times[1][1]) / float(other[1]) if other else None))
    return found


def _x(part: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(part, _LARGEST) / _LARGEST


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{text}</text>'


def draw() -> str:
    """The picture as SVG."""
    rows = bars()
    height = _TOP + _ROW * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(20, 22, "Speed as a part of what the hardware allows (one NVIDIA H200; longer is better)", size=14),
        f'<rect x="{_LEFT}" y="32" width="12" height="10" fill="{_OURS}"/>' + _text(_LEFT + 18, 41, "torch_memory_saver"),
        f'<rect x="{_LEFT + 160}" y="32" width="12" height="10" fill="{_PEER}"/>'
        + _text(_LEFT + 178, 41, "C++ package 0.0.10"),
    ]
    bottom = _TOP + _ROW * len(rows)
    for percent in (0, 25, 50, 75, 100, 125):
        x = _x(percent / 100)
        parts.append(
            f'<line x1="{x:.0f}" y1="{_TOP}" x2="{x:.0f}" y2="{bottom}" stroke="{_INK if percent == 100 else _GRID}"/>'
        )
        parts.append(_text(x, bottom + 16, f"{percent} %", "middle", 11))
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(_text(_LEFT - 8, y + 14, row.label, "end"))
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{_x(row.ours) - _LEFT:.1f}" height="8" fill="{_OURS}"/>')
        if row.peer is not None:
            parts.append(f'<rect x="{_LEFT}" y="{y + 11}" width="{_x(row.peer) - _LEFT:.1f}" height="5" fill="{_PEER}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
