"""Draws docs/images/schedule.svg: a step of four ranks with two chunks each.

    python docs/draw_schedule.py

Needs matplotlib. tests/docs/test_pictures.py fails where the picture is not what `plot_schedule` draws.
"""

from __future__ import annotations

from pathlib import Path

from torch_memory_saver.layer_graphs.plan import Timeline, pipeline_order, plot_schedule

PICTURE = Path(__file__).resolve().parent / "images" / "schedule.svg"

PP, VPP, MICROBATCHES = 4, 2, 8


def orders() -> list[tuple[int, ...]]:
    """Return the orders that the picture shows."""
    return [pipeline_order(PP, rank, MICROBATCHES, VPP) for rank in range(PP)]


def draw(path: Path) -> Timeline:
    """Writes the picture as SVG."""
    return plot_schedule(path, orders())


if __name__ == "__main__":
    draw(PICTURE)
