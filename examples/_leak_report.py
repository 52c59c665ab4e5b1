"""The table and the plot of the runs of memory_leak.py."""

from __future__ import annotations

import importlib
from typing import Any

from _check import MIB
from _leak_pipeline import ROLES, Results

_NUMBER = 10
#: Colours: of the run as it is, of the run with fix and release, and of the axis labels.
_BEFORE, _AFTER, _INK = "#c53030", "#2b6cb0", "#4a5568"
_DPI = 110


def table(results: Results) -> str:
    """Return a table of PyTorch's counters in each process after each step, in MiB."""
    heads = "  ".join(f"{role:^{2 * _NUMBER}}" for role in ROLES)
    columns = "  ".join(f"{'allocated':>{_NUMBER}}{'reserved':>{_NUMBER}}" for _ in ROLES)
    lines = [f"  MiB   {heads}".rstrip(), f"  step  {columns}"]
    for step, counters in enumerate(zip(*(results.memory[role] for role in ROLES), strict=True), 1):
        cells = (f"{one.allocated / MIB:>{_NUMBER}.1f}{one.reserved / MIB:>{_NUMBER}.1f}" for one in counters)
        lines.append(f"  {step:>4}  {'  '.join(cells)}")
    return "\n".join(lines)


def plot(path: str, before: Results, after: Results) -> None:
    """Draw a panel for each process, with both runs. The suffix of `path` sets the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = importlib.import_module("matplotlib")
    figures = importlib.import_module("matplotlib.figure")
    ticks = importlib.import_module("matplotlib.ticker")
    with matplotlib.rc_context({"svg.hashsalt": "memory_leak", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = figures.Figure(figsize=(11, 3.9), layout="constrained")
        for axes, role in zip(figure.subplots(1, len(ROLES)), ROLES, strict=True):
            _panel(axes, role, before, after)
            axes.xaxis.set_major_locator(ticks.MaxNLocator(integer=True))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(path, dpi=_DPI, facecolor="white", metadata={"Date": None} if path.endswith(".svg") else None)


def _panel(axes: Any, role: str, before: Results, after: Results) -> None:
    highest = 0.0
    for results, colour, name in (
        (before, _BEFORE, "as it is"),
        (after, _AFTER, "with the fix and TMS_RELEASE_CACHED=pause"),
    ):
        steps = range(1, len(results.memory[role]) + 1)
        for attribute, style, width in (("reserved", "-", 2.0), ("allocated", ":", 2.4)):
            values = [getattr(counters, attribute) / MIB for counters in results.memory[role]]
            label = f"{attribute}, {name}"
            axes.plot(steps, values, style, color=colour, linewidth=width, marker="o", markersize=3.5, label=label)
            highest = max(highest, *values)
    axes.set_title(role, fontsize=11)
    axes.set_ylim(0, highest * 1.1)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("MiB after the step", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
