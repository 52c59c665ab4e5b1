"""The data of the page, folded to a bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch_memory_saver._stacks import CallStack
from torch_memory_saver.observe._html import Document

from ..drift import Drift, allocation_orders
from ..findings import Findings
from ..fragmentation import DeviceUsage, Fragmentation
from ..growth import StackGrowth
from ..processes import Process, Series
from ..table import reasons, render
from .pictures import StackNumbers, bars, layers

__all__ = ["page"]

_PAGE = Document(__package__, "template.html", ("tables.js", "pictures.js"), ("style.css",))
#: Rows of each table.
_MAX_ROWS = 40
_MAX_DRIFTS = 12
#: Devices of processes, and moments of each, that have pictures.
_MAX_VIEWS = 8
_MAX_MOMENTS = 5
#: Call stacks that are named; the others are "other call stacks".
_MAX_STACKS = 400
_MAX_RECORDED_STACKS = 100
#: Width of the table for readers without JavaScript.
_TABLE_WIDTH = 110


def page(findings: Findings, series: Sequence[Series]) -> str:
    """Return the page.

    Args:
        findings: The results.
        series: The series that were compared.
    """
    return _PAGE.page(_data(findings, series), {"TABLE": render(findings, _TABLE_WIDTH)})


def _data(findings: Findings, series: Sequence[Series]) -> dict[str, Any]:
    shown = findings.processes[:_MAX_VIEWS]
    by_process = {one.process: one for one in series}
    drawn = [(by_process[usage.process], usage.device) for usage in shown]
    numbers = StackNumbers((leak.stack for leak in findings.leaks), [*_numbered_stacks(findings), *_recorded(drawn)])
    views = [_view(by_process[usage.process], usage, numbers) for usage in shown]
    return {
        "moments": list(findings.moments),
        "notes": [*findings.notes, *_left_out(findings)],
        "processes": [_usage(usage) for usage in findings.processes],
        "leaks": _growths(findings.leaks, numbers),
        "warmUps": _growths(findings.warm_ups, numbers),
        "grown": _growths(findings.grown, numbers),
        "drifts": [_drift(drift, numbers) for drift in findings.drifts[:_MAX_DRIFTS]],
        "fragmentation": [_fragmentation(found, numbers) for found in findings.fragmentation],
        "views": views,
        **numbers.data(),
    }


def _numbered_stacks(findings: Findings) -> Iterable[CallStack]:
    """Yield the stacks that have a number: those of the tables, then those with the most bytes."""
    yield from (growth.stack for growth in findings.leaks[:_MAX_ROWS])
    for drift in findings.drifts[:_MAX_DRIFTS]:
        yield drift.stack
        yield from (stack for stack, _ in drift.below)
    yield from (holder.stack for found in findings.fragmentation for holder in found.holders)
    for growths in (findings.warm_ups, findings.grown):
        yield from (growth.stack for growth in growths[:_MAX_ROWS])
    largest: Counter[CallStack] = Counter()
    for growth in findings.growths:
        largest[growth.stack] = max(largest[growth.stack], *growth.bytes)
    yield from (stack for stack, _ in largest.most_common(_MAX_STACKS))


def _recorded(drawn: Iterable[tuple[Series, int]]) -> Iterable[CallStack]:
    """Return the stacks with the most bytes in the histories.

    Most of them allocate memory that is freed again.
    """
    largest: Counter[CallStack] = Counter()
    for one, device in drawn:
        for snapshot in one.snapshots:
            for event in snapshot.events.get(device, ()):
                if event.action == "alloc" and event.bytes > largest[event.stack]:
                    largest[event.stack] = event.bytes
    return (stack for stack, _ in largest.most_common(_MAX_RECORDED_STACKS))


def _left_out(findings: Findings) -> Iterable[str]:
    stacks = len({growth.stack for growth in findings.growths})
    if stacks > _MAX_STACKS:
        yield f"The {_MAX_STACKS} largest of {stacks} call stacks are named in the pictures."
    if len(findings.processes) > _MAX_VIEWS:
        yield f"Pictures show the first {_MAX_VIEWS} of {len(findings.processes)} devices of processes in the table."
    if len(findings.moments) > _MAX_MOMENTS:
        yield f"Pictures show {_MAX_MOMENTS} of {len(findings.moments)} moments."
    for name, rows in (("leaks", findings.leaks), ("warm-ups", findings.warm_ups), ("grown stacks", findings.grown)):
        if len(rows) > _MAX_ROWS:
            yield f"The table of {name} has the first {_MAX_ROWS} of {len(rows)}."
    if len(findings.drifts) > _MAX_DRIFTS:
        yield f"The table of drifts has the {_MAX_DRIFTS} of most bytes."


def _view(series: Series, usage: DeviceUsage, numbers: StackNumbers) -> dict[str, Any]:
    orders = allocation_orders(series.snapshots, usage.device)
    chosen = _spread(len(series.snapshots), _MAX_MOMENTS)
    return {
        "where": _where(usage.process, usage.device),
        "snapshots": [
            {
                "moment": series.moments[number],
                "reserved": usage.reserved[number],
                "allocated": usage.allocated[number],
                "bars": bars(series.snapshots[number].segments_of(usage.device), numbers),
                "timeline": layers(series.snapshots[number].events.get(usage.device, ()), orders[number], numbers),
            }
            for number in chosen
        ],
    }


def _spread(length: int, most: int) -> list[int]:
    """Return at most `most` numbers below `length`, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [at * (length - 1) // (most - 1) for at in range(most)]


def _where(process: Process, device: int) -> str:
    return f"{process}, device {device}"


def _usage(usage: DeviceUsage) -> dict[str, Any]:
    return {
        "where": _where(usage.process, usage.device),
        "reserved": usage.reserved,
        "allocated": usage.allocated,
        "unused": usage.unused,
        "held": usage.held,
        "paused": usage.paused,
    }


def _growths(growths: Sequence[StackGrowth], numbers: StackNumbers) -> list[dict[str, Any]]:
    return [
        {
            "where": _where(growth.process, growth.device),
            "stack": numbers[growth.stack],
            "bytes": growth.bytes,
            "blocks": growth.blocks,
            "grewLast": growth.grew_last,
        }
        for growth in growths[:_MAX_ROWS]
    ]


def _drift(drift: Drift, numbers: StackNumbers) -> dict[str, Any]:
    return {
        "where": _where(drift.process, drift.device),
        "stack": numbers[drift.stack],
        "bytes": drift.bytes,
        "blocks": drift.blocks,
        "positions": drift.positions,
        "below": [[numbers[stack], size] for stack, size in drift.below],
    }


def _fragmentation(found: Fragmentation, numbers: StackNumbers) -> dict[str, Any]:
    return {
        "where": _where(found.usage.process, found.usage.device),
        "reasons": reasons(found),
        "unused": found.usage.unused,
        "cached": found.usage.cached[-1],
        "holders": [[numbers[one.stack], one.bytes, one.blocks, one.segments, one.held] for one in found.holders],
    }
