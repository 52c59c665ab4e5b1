"""The state and the counters in the OpenMetrics text format.

Prometheus and the textfile collector of its node exporter read this format.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver._files import write_text_file

__all__ = ["format_metrics", "metrics", "write_metrics"]

_PREFIX = "torch_memory_saver_"
#: The collector that reads the file often runs as another user.
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True)
class _Total:
    """A counter of the native core as one sample of a family.

    Attributes:
        counter: Name of the counter in ``stats().counters``.
        family: Name of the metric, without the prefix and "_total".
        labels: Labels of the sample.
        per: Number of units of the counter in one unit of the metric.
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
    _Total("failed_pauses_total", "failures", {"operation": "pause"}),
    _Total("failed_resumes_total", "failures", {"operation": "resume"}),
    _Total("failed_allocations_total", "failures", {"operation": "allocate"}),
    _Total("pause_nanoseconds_total", "call_seconds", {"operation": "pause"}, per=_NS_PER_SECOND),
    _Total("resume_nanoseconds_total", "call_seconds", {"operation": "resume"}, per=_NS_PER_SECOND),
    _Total("pause_copied_bytes_total", "kept_bytes", {"how": "copied"}),
    _Total("pause_unchanged_bytes_total", "kept_bytes", {"how": "unchanged"}),
)
#: Families: the metric's type, its unit, what it counts.
_FAMILIES = {
    "memory_bytes": (
        "gauge",
        "bytes",
        "Memory by tag, device and state: resident, slack and deferred (both of freed allocations), paused, damaged (not "
        "usable) or backup.",
    ),
    "shared_bytes": (
        "gauge",
        "bytes",
        "Objects of the shared store that this process holds, each counted once: written by it (made), or found (linked).",
    ),
    "calls": ("counter", "", "Calls that succeeded."),
    "failures": ("counter", "", "Pauses, resumes and allocations that failed."),
    "call_seconds": ("counter", "seconds", "Time of the pauses and resumes that succeeded."),
    "kept_bytes": (
        "counter",
        "bytes",
        "Contents that pauses kept: copied, or unchanged since an earlier pause and not copied.",
    ),
}


def metrics() -> str:
    """Return the managed memory by tag, device and state, and the counts of calls, as OpenMetrics text."""
    devices = [row.device for row in _core.usage(None) if row.tag is None]
    rows = [(device, row) for device in devices for row in _core.usage(None, device) if row.tag is not None]
    return format_metrics(rows, _core.counters())


def write_metrics(path: str | os.PathLike[str]) -> Path:
    """Write :func:`metrics` to a file that a reader never finds half-written.

    The text is written to another file, which is then renamed. A missing folder is created. Other users can read both, as
    far as the umask allows.

    Returns:
        The path.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
    """
    target = Path(path)
    write_text_file(metrics(), target, "write_metrics", "the metrics were", _FILE_MODE, _FOLDER_MODE)
    return target


def format_metrics(rows: Iterable[tuple[int, _core.Usage]], counters: Mapping[str, int]) -> str:
    """Return the OpenMetrics text for these counters and the usage of tags, each with its device."""
    samples: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    samples["memory_bytes"] = list(_memory(rows))
    samples["shared_bytes"] = list(_shared(counters))
    for total in _TOTALS:
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


def _memory(rows: Iterable[tuple[int, _core.Usage]]) -> Iterator[str]:
    for device, row in sorted(rows, key=lambda each: (each[1].tag or "", each[0])):
        sizes = {
            "resident": row.resident_bytes,
            "slack": row.slack_bytes,
            "deferred": row.deferred_bytes,
            "paused": row.paused_bytes,
            "damaged": row.damaged_bytes,
            "backup": row.backup_bytes,
        }
        for state, value in sizes.items():
            yield _sample("memory_bytes", {"tag": row.tag or "", "device": str(device), "state": state}, str(value))


def _shared(counters: Mapping[str, int]) -> Iterator[str]:
    made = counters["shared_made_bytes"]
    for how, value in (("made", made), ("linked", counters["shared_backup_bytes"] - made)):
        yield _sample("shared_bytes", {"how": how}, str(value))


def _sample(name: str, labels: Mapping[str, str], value: str) -> str:
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{_PREFIX}{name}{{{inside}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
