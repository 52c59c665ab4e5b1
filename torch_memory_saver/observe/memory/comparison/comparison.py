"""The function compare(), which finds the memory that grew in each process, and its result.

The results are Python values, or plain values for JSON. Sizes are bytes. The module combines the results of the other
modules, and finds nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..model import Snapshot
from .drift import Drift, drifts
from .fragmentation import DeviceUsage, Fragmentation, device_usages, find_fragmentation
from .growth import GrowthKind, StackGrowth, stack_growths
from .html import page
from .processes import Moment, Process, Series, read_moments, series_of
from .steps import at_one_point, point_name
from .table import render

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Its `str()` is the table that the command `compare` prints.

    Attributes:
        moments: The names of the moments that were compared, in order.
        processes: The memory of each process and device. Entries with leaks come first, by leaked bytes; then entries with
            fragmentation.
        growths: Every call stack of every process and device, the largest growth first.
        drifts: Blocks that rise in the active-memory timeline; for each device, the 50 kinds with the most bytes.
        fragmentation: Devices of processes whose unused memory is a finding.
        notes: Facts about the input that the reader should know: processes that a moment lacks, recording that was off,
            snapshots that were not compared.
    """

    moments: tuple[str, ...]
    processes: tuple[DeviceUsage, ...]
    growths: tuple[StackGrowth, ...]
    drifts: tuple[Drift, ...]
    fragmentation: tuple[Fragmentation, ...]
    notes: tuple[str, ...]
    _series: tuple[Series, ...] = field(repr=False, compare=False)

    @property
    def leaks(self) -> tuple[StackGrowth, ...]:
        """The call stacks whose live bytes never fell and still grow at the end."""
        return self._of(GrowthKind.LEAK)

    @property
    def warm_ups(self) -> tuple[StackGrowth, ...]:
        """The call stacks whose live bytes grew, never fell, and have stopped growing or grew once."""
        return self._of(GrowthKind.WARM_UP)

    @property
    def grown(self) -> tuple[StackGrowth, ...]:
        """The call stacks with more live bytes at the second moment, if there are only two moments."""
        return self._of(GrowthKind.GROWN)

    @property
    def varying(self) -> tuple[StackGrowth, ...]:
        """The call stacks whose live bytes fell in some interval."""
        return self._of(GrowthKind.VARYING)

    def __str__(self) -> str:
        return render(self)

    def table(self, width: int, top: int = 10, varying: bool = False) -> str:
        """Return the same text as `str()`, for a terminal of `width` characters.

        Args:
            width: Characters in a line.
            top: Number of rows of each kind. The table states how many more there are.
            varying: Whether to list the call stacks that vary as well.
        """
        return render(self, width, top, varying)

    def html(self) -> str:
        """Return a page with the findings, a bar for each segment and the active-memory timeline.

        The page needs no other file and no network.
        """
        return page(self, self._series)

    def as_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return the findings as dicts, lists, texts and numbers, for JSON.

        Args:
            top: Number of entries of each list. None: all entries.
        """
        return _as_dict(self, top)

    def _of(self, kind: GrowthKind) -> tuple[StackGrowth, ...]:
        return tuple(growth for growth in self.growths if growth.kind is kind)


def compare(*snapshots: str | os.PathLike[str] | Snapshot) -> Comparison:
    """Compare snapshots of one or more processes, taken at several moments.

    With three or more moments, memory that still grows is distinguished from memory that grew once or has stopped. If a
    process has several snapshots in each step of its program, one before each of its pauses, those of one point of the step
    are compared. PyTorch is not needed.

    Args:
        snapshots: Files, or folders of moments as MemorySnapshotSampler writes them, in the order of time; or what
            `load_snapshot` returned. If a folder has several runs, the newest is compared.

    Raises:
        InvalidArgumentError: An input is no snapshot, or two are of one process and one moment.
    """
    moments, older_runs = read_moments(snapshots)
    recorded = series_of(moments)
    labels, series = _compared(moments, recorded)
    growths = sorted((growth for one in series for growth in stack_growths(one)), key=lambda growth: -growth.growth)
    leaked = _leaked(growths)
    usages, found = [], []
    for one in series:
        for usage in device_usages(one):
            usages.append(usage)
            fragmentation = find_fragmentation(one, usage)
            found += [fragmentation] if fragmentation else []
    fragmented = {(one.usage.process, one.usage.device): one.usage.unused[-1] for one in found}

    def rank(usage: DeviceUsage) -> tuple[int, int, int]:
        where = usage.process, usage.device
        return -leaked.get(where, 0), -fragmented.get(where, 0), -usage.allocated[-1]

    return Comparison(
        moments=labels,
        processes=tuple(sorted(usages, key=rank)),
        growths=tuple(growths),
        drifts=tuple(
            sorted((drift for one in series for drift in drifts(one)), key=lambda drift: -drift.bytes * drift.blocks)
        ),
        fragmentation=tuple(sorted(found, key=lambda one: rank(one.usage))),
        notes=(
            *older_runs,
            *_absences(moments, recorded, series),
            *_unrecorded(series),
            *_steps(recorded, series),
            *_few(labels),
        ),
        _series=series,
    )


def _compared(moments: Sequence[Moment], recorded: Sequence[Series]) -> tuple[tuple[str, ...], tuple[Series, ...]]:
    """Return the names of the moments that are compared, and each process at one point of its step, numbered by these."""
    chosen = [at_one_point(one) for one in recorded]
    used = sorted({moment for one in chosen for moment in one.moments})
    number = {moment: at for at, moment in enumerate(used)}
    return tuple(moments[moment].label for moment in used), tuple(
        replace(one, moments=tuple(number[moment] for moment in one.moments)) for one in chosen
    )


def _leaked(growths: Sequence[StackGrowth]) -> dict[tuple[Process, int], int]:
    """Return the bytes by which leaks grew, for each process and device."""
    leaked: dict[tuple[Process, int], int] = {}
    for growth in growths:
        if growth.kind is GrowthKind.LEAK:
            where = growth.process, growth.device
            leaked[where] = leaked.get(where, 0) + growth.growth
    return leaked


def _few(labels: Sequence[str]) -> Iterator[str]:
    if len(labels) == 1:
        yield "One moment: growth needs two, and a leak is told from a warm-up by three."
    elif len(labels) == 2:
        yield "Two moments: what grew may be a leak or a warm-up. Give three or more to tell them apart."


def _steps(recorded: Sequence[Series], compared: Sequence[Series]) -> Iterator[str]:
    for before, after in zip(recorded, compared, strict=True):
        if len(after.snapshots) < len(before.snapshots):
            point = point_name(after.snapshots[0])
            yield (
                f"{after.process} has several snapshots in each step. Compared are {len(after.snapshots)} of "
                f"{len(before.snapshots)}, those {point}."
            )


def _absences(moments: Sequence[Moment], recorded: Sequence[Series], compared: Sequence[Series]) -> Iterator[str]:
    if any(len(before.snapshots) > len(after.snapshots) for before, after in zip(recorded, compared, strict=True)):
        return  # The moments are those of one process, in which the others take no part.
    for one in recorded:
        missing = [moment.label for at, moment in enumerate(moments) if at not in one.moments]
        if missing:
            yield f"{one.process} has no snapshot at {', '.join(missing)}: its figures skip these."


def _unrecorded(series: Sequence[Series]) -> Iterator[str]:
    for one in series:
        if any(snapshot.history_enabled is False for snapshot in one.snapshots):
            yield (
                f"{one.process} recorded no history in some snapshots: use `run --record snapshots,history`, or call "
                "record_history(), to learn its call stacks."
            )


def _as_dict(comparison: Comparison, top: int | None = None) -> dict[str, Any]:
    """Return the findings as plain values.

    `top` is the number of entries of each list; None means all.
    """
    return {
        "moments": list(comparison.moments),
        "notes": list(comparison.notes),
        "processes": [_usage(usage) for usage in comparison.processes],
        "leaks": _growths(comparison.leaks[:top]),
        "warm_ups": _growths(comparison.warm_ups[:top]),
        "grown": _growths(comparison.grown[:top]),
        "varying": _growths(comparison.varying[:top]),
        "drifts": [
            {
                "process": asdict(drift.process),
                "device": drift.device,
                "stack": drift.stack.as_dict(),
                "bytes": drift.bytes,
                "blocks": drift.blocks,
                "positions": list(drift.positions),
                "below": [{"stack": stack.as_dict(), "growth": size} for stack, size in drift.below],
            }
            for drift in comparison.drifts[:top]
        ],
        "fragmentation": [_fragmentation(found) for found in comparison.fragmentation],
    }


def _growths(growths: Sequence[StackGrowth]) -> list[dict[str, Any]]:
    return [
        {
            "process": asdict(growth.process),
            "device": growth.device,
            "stack": growth.stack.as_dict(),
            "bytes": list(growth.bytes),
            "blocks": list(growth.blocks),
            "requested_bytes": list(growth.requested_bytes),
            "growth": growth.growth,
        }
        for growth in growths
    ]


def _usage(usage: DeviceUsage) -> dict[str, Any]:
    return asdict(usage)


def _fragmentation(found: Fragmentation) -> dict[str, Any]:
    return {
        "usage": _usage(found.usage),
        "is_held": found.usage.is_held,
        "unused_grows": found.usage.unused_grows,
        "holders": [
            {
                "stack": holder.stack.as_dict(),
                "bytes": holder.bytes,
                "blocks": holder.blocks,
                "segments": holder.segments,
                "held": holder.held,
            }
            for holder in found.holders
        ],
    }
