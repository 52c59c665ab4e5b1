"""The drawing of memory logs: a panel for each process and device, with time from left to right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch_memory_saver._plot import write_picture
from torch_memory_saver.errors import InvalidArgumentError

from .log import MemoryRow

__all__ = ["plot_memory_log"]

_GIB = 1 << 30
_MIB = 1 << 20
#: Lines that are drawn for each panel: the attribute of a row, its name in the legend, colour, style.
_LINES = (
    ("device_used", "device used, all processes", "#718096", ":"),
    ("other_processes", "other processes", "#805ad5", "--"),
    ("reserved", "reserved by PyTorch", "#2b6cb0", "-"),
    ("allocated", "allocated by PyTorch", "#dd6b20", "-"),
)
_PHYSICAL, _PAUSED, _INK = "#bee3f8", "#a0aec0", "#4a5568"
_WIDTH, _INCHES_PER_PANEL, _INCHES_AROUND = 10.0, 2.3, 0.9
#: Maximum number of marks in a panel that get labels. The labels of more marks would cover each other, so only their lines
#: are drawn.
_MAX_LABELS = 24
#: Upper limit of the vertical axis as a multiple of the highest value, so that labels have room above it.
_HEADROOM = 1.55
#: Maximum number of characters of a label.
_MAX_LABEL = 26


def plot_memory_log(path: str | os.PathLike[str], rows: Sequence[MemoryRow], *, title: str | None = None) -> None:
    """Draw the rows of one or several processes: a panel for each process and device, on one scale of time and bytes.

    The area is physical memory of PyTorch; the hatched area above it, up to `reserved`, is paused. Marks are vertical lines
    with their labels.

    Args:
        path: The file to write. Its suffix selects the format: ``.svg``, ``.png`` or ``.pdf``.
        rows: Rows from :attr:`MemoryLog.rows` or `read_memory_log`. Rows without a device are skipped.
        title: The title above the picture.

    Raises:
        InvalidArgumentError: matplotlib is not installed, does not know the format, or there is no row with a device.
        OSError: The file cannot be written.
    """
    panels = _panels(rows)
    if not panels:
        raise InvalidArgumentError("there is nothing to draw: no row has a device")
    height = _INCHES_AROUND + _INCHES_PER_PANEL * len(panels)
    write_picture(path, "plot_memory_log", (_WIDTH, height), lambda figure: _draw(figure, panels, title))


def _panels(rows: Sequence[MemoryRow]) -> list[tuple[str, list[MemoryRow]]]:
    """Return a title and the rows, in order of time, for each process and device."""
    panels: dict[tuple[str, int, int, int], list[MemoryRow]] = {}
    for row in sorted(rows, key=lambda row: row.time):
        if row.device is not None:
            rank = -1 if row.rank is None else row.rank
            panels.setdefault((row.role, rank, row.pid, row.device), []).append(row)
    titles = {
        key: ", ".join(filter(None, [key[0], f"rank {key[1]}" if key[1] >= 0 else "", f"pid {key[2]}", f"device {key[3]}"]))
        for key in panels
    }
    return [(titles[key], panels[key]) for key in sorted(panels)]


def _draw(figure: Any, panels: list[tuple[str, list[MemoryRow]]], title: str | None) -> None:
    every = [row for _, rows in panels for row in rows]
    begin = min(row.time for row in every)
    highest = max(max(row.reserved or 0, row.device_used or 0) for row in every)
    unit, name = (_GIB, "GiB") if highest >= _GIB else (_MIB, "MiB")
    labelled = any(row.label for row in every)
    all_axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (panel, rows) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, rows, begin, unit)
        axes.set_title(panel, fontsize=9, loc="left")
        axes.set_ylabel(name)
        axes.set_ylim(0, max(1.0, highest / unit * (_HEADROOM if labelled else 1.05)))
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("seconds")
    if title is not None:
        figure.suptitle(title, fontsize=11)
    handles = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _draw_panel(axes: Any, rows: list[MemoryRow], begin: float, unit: int) -> None:
    times = [row.time - begin for row in rows]
    physical = [(row.physical or 0) / unit for row in rows]
    reserved = [(row.reserved or 0) / unit for row in rows]
    axes.fill_between(times, physical, color=_PHYSICAL, label="physical, of PyTorch", linewidth=0, gid="physical")
    if physical != reserved:
        axes.fill_between(
            times,
            physical,
            reserved,
            facecolor="none",
            edgecolor=_PAUSED,
            hatch="///",
            linewidth=0,
            label="paused",
            gid="paused",
        )
    for attribute, label, colour, style in _LINES:
        known = [(time, getattr(row, attribute)) for time, row in zip(times, rows, strict=True)]
        points = [(time, value / unit) for time, value in known if value is not None]
        if points:
            marker = "." if len(points) <= _MAX_LABELS else ""
            axes.plot(
                *zip(*points, strict=True), style, marker=marker, color=colour, label=label, linewidth=1.4, gid=attribute
            )
    marks = [(time, row.label) for time, row in zip(times, rows, strict=True) if row.label]
    for time, label in marks:
        axes.axvline(time, color=_INK, linewidth=0.5, alpha=0.5)
        if len(marks) <= _MAX_LABELS:
            text = label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "…"
            # x in seconds, y as a share of the panel's height.
            where = axes.get_xaxis_transform()
            axes.text(time, 0.99, text, rotation=90, fontsize=6, color=_INK, ha="right", va="top", transform=where)
