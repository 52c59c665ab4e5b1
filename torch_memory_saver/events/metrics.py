"""The state and the counters in the OpenMetrics text format, for Prometheus and its node exporter's textfile collector."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver.memory.files import write_text_file
from torch_memory_saver.usage import Allocation, take_stats

__all__ = ["format_metrics", "metrics", "write_metrics"]

_PREFIX = "torch_memory_saver_"
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True)
class _Total:
    """A counter of the native core as one sample of a family.

    Attributes:
        counter: Its name in ``stats().counters``. A sample whose counter the core does not have is left out.
        family: The metric's name, without the prefix and "_total".
        labels: Of the sample.
        per: How much of the counter is one of the metric.
    """

    counter: str
    family: str
    labels: Mapping[str, str]
    per: int = 1


_TOTALS = (
    _Total("pauses_total", "calls", {"operation": "pause"}),
    _Total("resumes_total", "calls", {"operation": "resume"}),
    _Total("allocations_total", "calls", {"operation": "allocate"}),
    _Total("frees_total", "calls", {"operation": "free"}),
    _Total("failures_total", "failures", {}),
    _Total("pause_nanoseconds_total", "call_seconds", {"operation": "pause"}, per=_NS_PER_SECOND),
    _Total("resume_nanoseconds_total", "call_seconds", {"operation": "resume"}, per=_NS_PER_SECOND),
)
#: Families: the metric's type, its unit, what it counts.
_FAMILIES = {
    "memory_bytes": ("gauge", "bytes", "Memory by tag, device and state: resident, paused (reserved addresses) or backup."),
    "calls": ("counter", "", "Calls that succeeded."),
    "failures": ("counter", "", "Pauses, resumes and allocations that failed."),
    "call_seconds": ("counter", "seconds", "Time of the pauses and resumes that succeeded."),
}


def metrics() -> str:
    """The managed memory by tag, device and state, and counts of calls, as OpenMetrics text."""
    stats = take_stats()
    return format_metrics(stats.allocations, stats.counters)


def write_metrics(path: str | os.PathLike[str]) -> Path:
    """Writes :func:`metrics` to a file, aside and then renamed, so that a reader never finds a part. A missing folder is
    made.

    Returns:
        The path.

    Raises:
        OSError: It could not be written. An existing file is unchanged.
    """
    target = Path(path)
    write_text_file(metrics(), target, "write_metrics", "the metrics were")
    return target


def format_metrics(allocations: Iterable[Allocation], counters: Mapping[str, int]) -> str:
    """The text for these allocations and counters."""
    samples: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    samples["memory_bytes"] = list(_memory(allocations))
    for total in _TOTALS:
        if total.counter in counters:
            value = counters[total.counter]
            number = str(value) if total.per == 1 else repr(value / total.per)
            samples[total.family].append(_sample(f"{total.family}_total", total.labels, number))
    lines = []
    for name, (kind, unit, text) in _FAMILIES.items():
        if not samples[name]:
            continue
        lines.append(f"# TYPE {_PREFIX}{name} {kind}")
        if unit:
            lines.append(f"# UNIT {_PREFIX}{name} {unit}")
        lines.append(f"# HELP {_PREFIX}{name} {text}")
        lines += samples[name]
    return "\n".join([*lines, "# EOF", ""])


def _memory(allocations: Iterable[Allocation]) -> Iterator[str]:
    sums: dict[tuple[str, int], dict[str, int]] = {}
    for row in allocations:
        held = sums.setdefault((row.tag, row.device), {"resident": 0, "paused": 0, "backup": 0})
        if row.state in ("active", "pausing", "repairing"):
            held["resident"] += row.reserved_bytes
        elif row.state in ("paused", "resuming"):
            held["paused"] += row.reserved_bytes
        held["backup"] += row.backup_bytes
    for (tag, device), held in sorted(sums.items()):
        for state, value in held.items():
            yield _sample("memory_bytes", {"tag": tag, "device": str(device), "state": state}, str(value))


def _sample(name: str, labels: Mapping[str, str], value: str) -> str:
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{_PREFIX}{name}{{{inside}}} {value}" if inside else f"{_PREFIX}{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
