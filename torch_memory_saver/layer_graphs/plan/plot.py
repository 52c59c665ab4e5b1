"""Pictures of a schedule: a row for each rank, time from left to right."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from torch_memory_saver._plot import write_picture

from .timeline import Timeline, run_orders

__all__ = ["plot_schedule"]

#: The colours of the first chunk and of the last one. The colours of chunks between them are mixed.
_FORWARD = ((0x9C, 0xC4, 0xEC), (0x2B, 0x6C, 0xB0))
_BACKWARD = ((0xF2, 0xD0, 0xA4), (0xC8, 0x7F, 0x3A))
_BUBBLE, _INK, _PALE = "#e2e8f0", "#1a202c", "#ffffff"
_INCHES_PER_RANK, _INCHES_AROUND, _WIDTH = 0.42, 1.35, 11.0
_ROW = 0.86
#: Boxes with less width for each digit do not show the number of their micro-batch.
_INCHES_FOR_A_DIGIT = 0.08
_POINTS_PER_INCH = 72
#: The maximum width of the white line around a box: in points, and as a share of the width of the box.
_EDGE, _EDGE_SHARE = 0.6, 0.12
#: The maximum number of columns in the legend. More columns do not fit into the width.
_COLUMNS = 5


def plot_schedule(
    path: str | os.PathLike[str],
    orders: Sequence[Sequence[int]],
    *,
    forward: float = 1,
    backward: float = 2,
    title: str | None = None,
) -> Timeline:
    """Draw the timeline of the orders of all ranks: ranks from top to bottom, time from left to right.

    Forwards are blue and backwards orange, darker for later chunks, each with the number of its micro-batch. Bubbles are
    grey. With one release of matplotlib, equal arguments give equal bytes of an SVG file.

    Args:
        path: The file to write. Its suffix selects the format: ``.svg``, ``.png`` or ``.pdf``.
        orders: The order of each rank.
        forward: How long a forward of one chunk takes, in any unit.
        backward: How long a backward of one chunk takes, in the same unit.
        title: The title above the picture. None means the number of ranks, chunks and micro-batches, and the bubble.

    Returns:
        The timeline that was drawn.

    Raises:
        InvalidArgumentError: matplotlib is not installed, it does not know the format, or the ranks would
            wait for each other for ever.
        OSError: The file cannot be written.
    """
    timeline = run_orders(orders, forward, backward)
    height = _INCHES_AROUND + _INCHES_PER_RANK * len(timeline.ranks)
    heading = _title(timeline) if title is None else title
    write_picture(path, "plot_schedule", (_WIDTH, height), lambda figure: _draw(figure, timeline, heading))
    return timeline


def _draw(figure: Any, timeline: Timeline, title: str) -> None:
    axes = figure.add_subplot()
    chunks = _chunks(timeline)
    inches = (_WIDTH - 1) / timeline.step
    for rank, row in enumerate(timeline.ranks):
        axes.barh(rank, timeline.step, _ROW, color=_BUBBLE, gid=f"bubble-{rank}")
        for work in row:
            length = work.end - work.start
            kind = "backward" if work.backward else "forward"
            colour = _colour(work.backward, work.chunk, chunks)
            name = f"{kind}-{rank}-{work.chunk}-{work.microbatch}"
            edge = min(_EDGE, _EDGE_SHARE * length * inches * _POINTS_PER_INCH)
            axes.barh(rank, length, _ROW, work.start, color=colour, edgecolor=_PALE, linewidth=edge, gid=name)
            number = str(work.microbatch)
            if length * inches >= _INCHES_FOR_A_DIGIT * len(number):
                ink = _PALE if work.chunk == chunks - 1 and chunks > 1 else _INK
                middle = (work.start + work.end) / 2
                axes.text(middle, rank, number, ha="center", va="center", fontsize=7, color=ink)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axes.set_ylim(len(timeline.ranks) - 0.4, -0.6)  # Rank 0 is at the top.
    axes.set_xlim(0, timeline.step)
    axes.set_xlabel("time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, fontsize=10)
    _legend(figure, chunks)


def _legend(figure: Any, chunks: int) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    names = {False: "forward", True: "backward"}
    entries = {
        f"{name}, chunk {chunk}" if chunks > 1 else name: _colour(backward, chunk, chunks)
        for backward, name in names.items()
        for chunk in range(chunks)
    }
    entries["bubble"] = _BUBBLE
    handles = [patch(color=colour, label=label) for label, colour in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), _COLUMNS), frameon=False, fontsize=9)


def _chunks(timeline: Timeline) -> int:
    return 1 + max(work.chunk for work in timeline.ranks[0])


def _title(timeline: Timeline) -> str:
    chunks = _chunks(timeline)
    microbatches = 1 + max(work.microbatch for work in timeline.ranks[0])
    counts = (
        _count(len(timeline.ranks), "rank"),
        _count(chunks, "chunk") + " each",
        _count(microbatches, "micro-batch", "es"),
    )
    bubble = timeline.bubble
    return f"{', '.join(counts)}: the bubble is {bubble.of_ideal:.1%} of the ideal time, {bubble.of_step:.1%} of the step"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}{plural if number > 1 else ''}"


def _colour(backward: bool, chunk: int, chunks: int) -> str:
    first, last = _BACKWARD if backward else _FORWARD
    share = chunk / (chunks - 1) if chunks > 1 else 0
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(first, last, strict=True))
