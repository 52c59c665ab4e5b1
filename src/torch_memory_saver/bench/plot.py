"""What was measured as a picture: how much of its limit each operation reaches."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

from .figures import AT_LEAST, AT_MOST, MEMORY, PARITY, Row
from .table import machine_line

__all__ = ["draw", "require"]

_OURS, _PEER, _MARK = "#2b6cb0", "#c8874a", "#1a202c"
_INCHES_PER_ROW, _INCHES_AROUND, _WIDTH = 0.34, 1.7, 10.0
_BAR = 0.38


def require() -> Any:
    """matplotlib's pyplot, without a display.

    Raises:
        InvalidArgumentError: It is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise InvalidArgumentError(f"--plot needs matplotlib: pip install 'torch_memory_saver[plot]' ({error})") from error


def draw(path: str, rows: Sequence[Row], machine: Mapping[str, Any], peer: str | None) -> None:
    """Writes a PNG with a bar for each row with bytes that were moved or mapped: speed in percent of the limit's.

    Raises:
        OSError: The file cannot be written.
    """
    pyplot = require()
    drawn = [row for row in rows if row.limit is not None and row.bytes and row.target.kind in (AT_LEAST, AT_MOST)]
    drawn = [row for row in drawn if not row.operation.endswith(PARITY)]
    figure, axes = pyplot.subplots(
        figsize=(_WIDTH, _INCHES_AROUND + _INCHES_PER_ROW * max(len(drawn), 1)), layout="constrained"
    )
    for index, row in enumerate(drawn):
        shares = [(_share(row, row.ratio), _OURS), (_share(row, row.peer_ratio), _PEER)]
        for offset, (share, colour) in enumerate(shares if peer else shares[:1]):
            if share is not None:
                height = index + (offset - 0.5) * _BAR if peer else index
                axes.barh(height, share, _BAR, color=colour)
                axes.text(share + 0.5, height, f"{share:.0f}", va="center", fontsize=7, color=_MARK)
        target = _share(row, row.target.value)
        if target is not None:
            axes.plot([target, target], [index - 0.45, index + 0.45], color=_MARK, linewidth=1.5)
    axes.set_yticks(range(len(drawn)), [f"{row.case}, {row.shape}: {row.operation}" for row in drawn], fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)  # The first row is at the top.
    axes.axvline(100, color=_MARK, linewidth=0.8, linestyle=":")
    shown = [share for row in drawn for share in (_share(row, row.ratio), _share(row, row.peer_ratio)) if share]
    axes.set_xlim(0, 1.06 * max([100.0, *shown]))
    axes.set_xlabel("speed, percent of the bare limit measured in the same run (line: target)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_OURS)]
    names = ["torch_memory_saver"]
    if peer:
        handles.append(pyplot.Rectangle((0, 0), 1, 1, color=_PEER))
        names.append(f"C++ package {peer}")
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_title(machine_line(machine), fontsize=9)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _share(row: Row, ratio: float | None) -> float | None:
    """The speed in percent of the limit's, of a ratio that is about times or about speeds."""
    if ratio is None or row.target.kind == MEMORY or not ratio:
        return None
    return 100 / ratio if row.target.kind == AT_MOST else 100 * ratio
