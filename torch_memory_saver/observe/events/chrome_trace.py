"""Events as a Chrome trace, which Perfetto and chrome://tracing show, alone or merged into a trace of torch.profiler.

Calls and their phases are complete events ("X"): on the track of their thread, in which they nest, and for phases of one
device on a track for each device and phase, because those may overlap. Allocations, frees and repairs are instants ("i").
Levels and the free memory of devices are counters ("C").
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_memory_saver._files import write_text_file
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.events.log import Event, EventLog, Level, events

__all__ = ["BASE_KEY", "trace_events", "write_chrome_trace"]

#: Key for the time to which the timestamps of torch.profiler refer, in nanoseconds since 1970.
BASE_KEY = "baseTimeNanoseconds"
_CATEGORY = "torch_memory_saver"
#: Tracks of devices have numbers above those of the kernel's threads, which are below 2^22.
_DEVICE_TRACKS = 1 << 24
_PHASES = ("create", "map", "copy")
_OTHER_PHASES = len(_PHASES)
_NS_PER_US = 1000


def write_chrome_trace(
    path: str | os.PathLike[str],
    *,
    base_time_nanoseconds: int | None = None,
    merge: str | os.PathLike[str] | None = None,
    log: EventLog | None = None,
) -> Path:
    """Write events as a Chrome trace.

    An existing file is replaced. A missing folder is created.

    Args:
        path: Path of the file.
        base_time_nanoseconds: Time since 1970 to which timestamps refer. Pass the ``baseTimeNanoseconds`` of another trace
            to compare both. The default is the time at which the first event began.
        merge: Path of a JSON trace that ``torch.profiler`` has exported. The file can be compressed (``.gz``). Its events
            are added to the new file, and its base time is used. A trace of this process shows pauses inside the
            ``record_function`` around them.
        log: Events of another process or moment (:func:`load_events`). The default is the latest events of this process.

    Returns:
        The path.

    Raises:
        InvalidArgumentError: `merge` is no trace with a ``baseTimeNanoseconds``, or both it and a base time are given.
        OSError: A file could not be read or written. Nothing is left behind.
    """
    if merge is not None and base_time_nanoseconds is not None:
        raise InvalidArgumentError("write_chrome_trace: merge has a base time of its own; give only one of the two")
    log = events() if log is None else log
    target = Path(path)
    trace: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}
    if merge is not None:
        trace = _read_trace(merge)
        base_time_nanoseconds = trace[BASE_KEY]
    if base_time_nanoseconds is None:
        base_time_nanoseconds = log.wall_offset_ns + min((event.began_ns for event in log.events), default=log.taken_ns)
    trace[BASE_KEY] = base_time_nanoseconds
    trace["traceEvents"] = [*trace["traceEvents"], *trace_events(log, base_time_nanoseconds, names_process=merge is None)]
    text = json.dumps(trace, separators=(",", ":"))
    write_text_file(text, target, "write_chrome_trace", "the trace was")
    return target


def _read_trace(path: str | os.PathLike[str]) -> dict[str, Any]:
    data = Path(path).read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if os.fspath(path).endswith(".gz") else data)
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidArgumentError(f"write_chrome_trace: {os.fspath(path)} is not JSON ({error})") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise InvalidArgumentError(f"write_chrome_trace: {os.fspath(path)} has no list traceEvents")
    if not isinstance(trace.get(BASE_KEY), int):
        raise InvalidArgumentError(
            f"write_chrome_trace: {os.fspath(path)} has no {BASE_KEY}: the time to which its timestamps refer is unknown; "
            "export it with torch.profiler of a newer PyTorch"
        )
    return trace


def trace_events(log: EventLog, base_ns: int, *, names_process: bool = True) -> list[dict[str, Any]]:
    """Return the events of the trace in the order of their begins, after the names of the tracks.

    Args:
        log: Log to show.
        base_ns: Nanoseconds since 1970 to which timestamps refer.
        names_process: Whether to name the process. False if another trace names it.
    """
    scale = _Scale(log, base_ns)
    rows = [*_durations(log, scale), *_instants(log, scale), *_counters(log, scale)]
    rows.sort(key=lambda row: (row["ts"], -row.get("dur", 0)))
    return [*_names(log, rows, names_process), *rows]


class _Scale:
    """The conversion of a log's times to timestamps, which are microseconds since the base."""

    def __init__(self, log: EventLog, base_ns: int) -> None:
        self._offset = log.wall_offset_ns - base_ns

    def __call__(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self._offset) / _NS_PER_US


def _track_of(event: Event) -> int:
    if event.kind != "phase" or event.device < 0:
        return event.thread
    phase = _PHASES.index(event.phase) if event.phase in _PHASES else _OTHER_PHASES
    return _DEVICE_TRACKS + event.device * (len(_PHASES) + 1) + phase


def _durations(log: EventLog, scale: _Scale) -> Iterator[dict[str, Any]]:
    ended = {event.call for event in log.events if event.kind == "end"}
    for event in log.events:
        if event.kind in ("end", "phase"):
            end = event.ended_ns
        elif event.kind == "begin" and event.call not in ended:
            end = max(log.taken_ns, event.ended_ns)  # the call continues
        else:
            continue
        yield {
            "ph": "X",
            "cat": _CATEGORY,
            "name": f"{event.operation}: {event.phase}" if event.phase else event.operation,
            "pid": log.pid,
            "tid": _track_of(event),
            "ts": scale(event.began_ns),
            "dur": (end - event.began_ns) / _NS_PER_US,
            "args": _arguments(event) | ({"unfinished": True} if event.kind == "begin" else {}),
        }


def _instants(log: EventLog, scale: _Scale) -> Iterator[dict[str, Any]]:
    for event in log.events:
        if event.kind not in ("allocate", "free", "repair"):
            continue
        yield {
            "ph": "i",
            "s": "t",
            "cat": _CATEGORY,
            "name": event.kind if event.status == "OK" else f"{event.kind} failed",
            "pid": log.pid,
            "tid": event.thread,
            "ts": scale(event.ended_ns),
            "args": _arguments(event),
        }


def _arguments(event: Event) -> dict[str, Any]:
    shown = {
        "call": event.call,
        "tag": event.tag,
        "device": None if event.device < 0 else event.device,
        "address": f"0x{event.address:x}" if event.address else None,
        "allocations": event.allocations,
        "bytes": event.bytes,
        "copied_bytes": event.copied_bytes,
        "unchanged_bytes": event.unchanged_bytes,
        "busy_us": event.busy_ns / _NS_PER_US,
        "status": None if event.status == "OK" else event.status,
        "driver_result": event.driver_result,
    }
    return {name: value for name, value in shown.items() if value}


def _counters(log: EventLog, scale: _Scale) -> Iterator[dict[str, Any]]:
    levels: dict[int, dict[str, Level]] = {}
    for time_ns, level in log.levels():
        held = levels.setdefault(level.device, {})
        before = held.get(level.tag, Level(level.tag, level.device))
        held[level.tag] = level
        for what in ("resident", "paused", "backup"):
            if getattr(level, f"{what}_bytes") == getattr(before, f"{what}_bytes"):
                continue
            yield _counter(
                log,
                f"GPU {level.device} {what} bytes",
                scale(time_ns),
                {tag: getattr(one, f"{what}_bytes") for tag, one in held.items()},
            )
    for event in log.events:
        if event.kind == "memory" and event.status == "OK":
            yield _counter(log, f"GPU {event.device} free bytes", scale(event.ended_ns), {"free": event.bytes})


def _counter(log: EventLog, name: str, ts: float, series: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "cat": _CATEGORY, "name": name, "pid": log.pid, "tid": 0, "ts": ts, "args": series}


def _names(log: EventLog, rows: list[dict[str, Any]], names_process: bool) -> Iterator[dict[str, Any]]:
    def name(kind: str, tid: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": log.pid, "tid": tid, "ts": 0, "args": {"name": text}}

    if names_process:
        rank = "" if log.rank is None else f" (rank {log.rank})"
        yield name("process_name", 0, f"{log.role}{rank}")
    for track in sorted({row["tid"] for row in rows if row["tid"] >= _DEVICE_TRACKS}):
        device, phase = divmod(track - _DEVICE_TRACKS, len(_PHASES) + 1)
        yield name("thread_name", track, f"GPU {device}: {(*_PHASES, 'other phases')[phase]}")
