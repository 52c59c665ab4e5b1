"""Draws the results: the speed of each operation in percent of its limit."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

from .figures import AT_MOST, MEMORY, PEER, Row
from .table import amount, groups, machine_line

__all__ = ["draw", "require"]

_OURS, _PEER, _MARK = "#2b6cb0", "#c8874a", "#1a202c"
_INCHES_PER_ROW, _INCHES_AROUND, _WIDTH = 0.34, 1.7, 10.0
_BAR = 0.38
_TARGET_WIDTH = 1.5


def require() -> Any:
    """matplotlib's pyplot, set up to draw without a display.

    Raises:
        InvalidArgumentError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise InvalidArgumentError(f"--plot needs matplotlib: pip install 'torch_memory_saver[plot]' ({error})") from error


def draw(path: str, rows: Sequence[Row], machine: Mapping[str, Any], peer: str | None) -> None:
    """Writes a PNG with a line for each row. A bar shows the speed in percent of the limit's. Without a limit there is only
    the measured amount. For the simulated GPU, whose times mean nothing, no targets are drawn. Rows that compare with the
    C++ package are left out: its bars stand beside ours.

    Raises:
        OSError: The file cannot be written.
    """
    pyplot = require()
    rows = [row for _, group in groups(rows) for row in group if not row.operation.endswith(PEER)]
    figure, axes = pyplot.subplots(
        figsize=(_WIDTH, _INCHES_AROUND + _INCHES_PER_ROW * max(len(rows), 1)), layout="constrained"
    )
    for index, row in enumerate(rows):
        _draw_row(axes, index, row, peer is not None, judged=not machine.get("simulated"))
    axes.set_yticks(range(len(rows)), [f"{row.case}, {row.shape}: {row.operation}" for row in rows], fontsize=8)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)  # The first row is at the top.
    axes.axvline(100, color=_MARK, linewidth=0.8, linestyle=":")
    shown = [share for row in rows for share in _shares(row) if share is not None]
    axes.set_xlim(0, 1.06 * max([100.0, *shown]))
    axes.set_xlabel("speed, percent of the limit measured in the same run")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(**_legend(pyplot, machine, peer), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_title(_title(machine), fontsize=9)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _draw_row(axes: Any, index: int, row: Row, with_peer: bool, judged: bool) -> None:
    bars = list(zip(_shares(row), (row.ours, row.peer), (_OURS, _PEER), strict=True))
    for offset, (share, measured, colour) in enumerate(bars if with_peer else bars[:1]):
        if measured is None:
            continue
        height = index + (offset - 0.5) * _BAR if with_peer else index
        axes.barh(height, share or 0, _BAR, color=colour)
        text = amount(row, measured) if share is None else f"{share:.0f}"
        axes.annotate(text, (share or 0, height), (3, 0), textcoords="offset points", va="center", fontsize=7, color=_MARK)
    target = _share(row, row.target.value) if judged and row.target.kind != MEMORY else None
    if target is not None:
        axes.plot([target, target], [index - 0.45, index + 0.45], color=_MARK, linewidth=_TARGET_WIDTH)


def _legend(pyplot: Any, machine: Mapping[str, Any], peer: str | None) -> dict[str, Any]:
    """Handles and labels of the legend, as arguments of `figure.legend`."""
    line = importlib.import_module("matplotlib.lines").Line2D
    entries = {"torch_memory_saver": pyplot.Rectangle((0, 0), 1, 1, color=_OURS)}
    if peer:
        entries[f"C++ package {peer}"] = pyplot.Rectangle((0, 0), 1, 1, color=_PEER)
    entries["100: the limit"] = line([], [], color=_MARK, linewidth=0.8, linestyle=":")
    if not machine.get("simulated"):
        entries["target"] = line([], [], color=_MARK, linewidth=_TARGET_WIDTH)
    return {"handles": list(entries.values()), "labels": list(entries)}


def _title(machine: Mapping[str, Any]) -> str:
    simulated = "\nOn the simulated GPU times mean nothing." if machine.get("simulated") else ""
    return machine_line(machine) + simulated


def _shares(row: Row) -> tuple[float | None, float | None]:
    """Our speed and the peer's, in percent of the limit's."""
    return _share(row, row.ratio), _share(row, row.peer_ratio)


def _share(row: Row, ratio: float | None) -> float | None:
    """The speed in percent of the limit's that follows from `ratio`; None if there is none."""
    if ratio is None or row.target.kind == MEMORY or not 0 < ratio < math.inf:
        return None
    return 100 / ratio if row.target.kind == AT_MOST else 100 * ratio
