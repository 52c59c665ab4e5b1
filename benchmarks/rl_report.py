"""The tables and the plot of rl_colocate.py."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_processes import KV_CACHE
from rl_sizes import GB, LAYERS, Sizes
from rl_strategies import COMPONENTS, PHASES, STRATEGIES, Step, Strategy

_COLORS = ("#2b6cb0", "#63b3ed", "#2f855a", "#9ae6b4", "#d69e2e", "#e9a8a8", "#9b5c8f", "#a0aec0")
_INK = "#4a5568"


@dataclass
class Outcome:
    """The outcome of a strategy.

    Attributes:
        steps: The steps of the strategy. Empty if it does not fit.
        missing: Bytes beyond those of the device that a strategy would need, if it does not fit.
        demand: Bytes by phase and component: those of the last step, or those that would be needed.
        largest: Bytes of the largest KV cache with which a step succeeded. None without the search.
    """

    strategy: type[Strategy]
    steps: list[Step]
    demand: dict[str, dict[str, int]]
    missing: int = 0
    largest: int | None = None

    @property
    def peak(self) -> int:
        return max(sum(phase.values()) for phase in self.demand.values())


@dataclass
class Results:
    """The results of a whole run.

    Attributes:
        capacity: Bytes of the GPU.
        weights: Seconds of each part of resuming the weights and taking the trainer's, for each round.
    """

    device: str
    capacity: int
    sizes: Sizes
    outcomes: list[Outcome]
    weights: list[dict[str, float]]

    def write(self, path: str) -> None:
        everything = asdict(self)
        for outcome in everything["outcomes"]:
            outcome["strategy"] = outcome["strategy"].name
        Path(path).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Results:
        """Read the file that `write` has written."""
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        strategies = {strategy.name: strategy for strategy in STRATEGIES}
        for outcome in found["outcomes"]:
            outcome["strategy"] = strategies[outcome["strategy"]]
            outcome["steps"] = [Step(**step) for step in outcome["steps"]]
        outcomes = [Outcome(**outcome) for outcome in found["outcomes"]]
        return cls(**{**found, "sizes": Sizes(**found["sizes"]), "outcomes": outcomes})

    def text(self) -> str:
        """Return the tables, in Markdown."""
        weights = _weights(self.weights, self.sizes)
        return f"{table(self.outcomes, self.capacity)}\n\n{components_table(self.outcomes, self.capacity)}\n\n{weights}"


def _weights(times: Sequence[dict[str, float]], sizes: Sizes) -> str:
    parts = {name: [each[name] * 1000 for each in times] for name in times[0]}
    amounts = [f"{name} {statistics.median(ms):.1f} [{min(ms):.1f}, {max(ms):.1f}]" for name, ms in parts.items()]
    return (
        f"Weights of {sizes.weights / GB:.1f} GB in {LAYERS} tensors, resumed from host memory and then taken from the "
        f"trainer, in ms: {', '.join(amounts)}."
    )


def spread(values: Sequence[float]) -> str:
    """Format the median and the range, in seconds."""
    if max(values) == 0:
        return "-"
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _gigabytes(size: int, capacity: int) -> str:
    """Format bytes as GB, with more decimals on a small GPU."""
    return f"{size / GB:.{1 if capacity >= 20 * GB else 3}f}"


def _label(component: str) -> str:
    return "KV cache" if component == KV_CACHE else component


def _sums(steps: Sequence[Step], parts: Sequence[str]) -> list[float]:
    return [sum(step.seconds[part] for part in parts) for step in steps]


def table(outcomes: Sequence[Outcome], capacity: int) -> str:
    """Return a table in Markdown with one row for each strategy. The first step of each is a warm-up, and is not counted."""
    rows: list[tuple[str, ...]] = [("strategy", "peak GB", "to rollout s", "of which", "to training s", "largest KV cache")]
    rows.append(("---",) * len(rows[0]))
    for outcome in outcomes:
        strategy, warm = outcome.strategy, outcome.steps[1:]
        cache = (
            "" if outcome.largest is None else f"{outcome.largest / GB:.1f} GB, {outcome.largest / capacity:.1%} of the GPU"
        )
        if not outcome.steps:
            text = f"does not fit: {_gigabytes(outcome.missing, capacity)} GB missing"
            rows.append((strategy.name, _gigabytes(outcome.peak, capacity), text, "", "", cache))
            continue
        parts = [f"{part} {statistics.median(_sums(warm, [part])):.2f}" for part in strategy.to_rollout_parts]
        rows.append(
            (
                strategy.name,
                _gigabytes(outcome.peak, capacity),
                spread(_sums(warm, strategy.to_rollout_parts)),
                ", ".join(parts),
                spread(_sums(warm, strategy.to_training_parts)),
                cache,
            )
        )
    return _markdown(rows)


def components_table(outcomes: Sequence[Outcome], capacity: int) -> str:
    """Return a table in Markdown of the memory by strategy, phase and component, in GB."""
    rows: list[tuple[str, ...]] = [("strategy", "phase", *(_label(name) for name in COMPONENTS), "used GB")]
    rows.append(("---",) * len(rows[0]))
    for outcome in outcomes:
        for phase, held in outcome.demand.items():
            amounts = [_gigabytes(held[name], capacity) if held[name] else "" for name in COMPONENTS]
            rows.append((outcome.strategy.name, phase, *amounts, _gigabytes(sum(held.values()), capacity)))
    return _markdown(rows)


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows if row[0] != "---") for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = ["-" * width if cell == "---" else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(path: str, results: Results) -> None:
    """Draw a stacked bar for each strategy and phase, and a line at the GPU's memory. The suffix of `path` sets the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    outcomes, capacity = results.outcomes, results.capacity
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams["svg.hashsalt"] = "rl_colocate"  # the same figures draw the same file
    figure, axes = pyplot.subplots(figsize=(11, 5.5), layout="constrained")
    ticks: list[tuple[float, str]] = []
    for index, outcome in enumerate(outcomes):
        first = index * (len(PHASES) + 1)
        axes.text(
            first + (len(PHASES) - 1) / 2,
            1.02,
            _heading(outcome, capacity),
            transform=axes.get_xaxis_transform(),
            ha="center",
        )
        for offset, phase in enumerate(PHASES):
            if phase in outcome.demand:
                _bar(axes, first + offset, outcome.demand[phase], bool(outcome.steps))
            ticks.append((first + offset, phase))
    axes.axhline(capacity / GB, color=_INK, linewidth=1, linestyle="--")
    axes.text(len(outcomes) * (len(PHASES) + 1) - 1.4, capacity / GB, "the GPU", color=_INK, va="bottom", ha="right")
    axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks], rotation=40, ha="right", fontsize=9)
    axes.set_ylabel("device memory, GB")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in _COLORS]
    labels = [_label(name) for name in COMPONENTS]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COMPONENTS), frameon=False, fontsize=9)
    figure.suptitle(f"A trainer and an engine on one {results.device} of {_gigabytes(capacity, capacity)} GB", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _heading(outcome: Outcome, capacity: int) -> str:
    if outcome.steps:
        return outcome.strategy.name
    return f"{outcome.strategy.name}:\n{_gigabytes(outcome.missing, capacity)} GB missing"


def _bar(axes: Any, place: int, held: dict[str, int], fits: bool) -> None:
    """Draw a stacked bar. A bar that does not fit is pale."""
    bottom = 0.0
    for name, color in zip(COMPONENTS, _COLORS, strict=True):
        axes.bar(place, held[name] / GB, bottom=bottom, color=color, width=0.8, alpha=1.0 if fits else 0.45)
        bottom += held[name] / GB
