"""The data of the page. Large inputs are reduced to a bounded size, and what was left out is said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Any

from torch_memory_saver._pages import Document
from torch_memory_saver.events.timeline.levels import Call, calls_of, failures_of
from torch_memory_saver.events.timeline.merge import OTHER, Gpu, Host
from torch_memory_saver.events.timeline.page.table import gpu_name, host_name, process_name, table
from torch_memory_saver.events.timeline.reduce import reduced

__all__ = ["page", "stacks_of"]

_PAGE = Document(__package__, "template.html", ("columns.js", "pictures.js", "views.js"), ("style.css",))
#: Changes of levels, and calls, of a page.
_MOST_ROWS = 240_000
_MOST_CALLS = 12_000
_MOST_FAILURES = 2_000
_NS_PER_MS = 1_000_000


def page(hosts: Sequence[Host]) -> str:
    """The page."""
    return _PAGE.page(_data(hosts), {"TABLE": table(hosts)})


def stacks_of(gpu: Gpu) -> list[list[int]]:
    """The bands of a GPU that are drawn on top of each other, by their numbers: what is on the GPU; for each process its
    resident and paused memory; for each process its backups."""
    resident = [number for number, band in enumerate(gpu.bands) if band.kind in ("resident", "other")]
    of_processes = [
        [number for number, band in enumerate(gpu.bands) if band.process == process and band.kind in kinds]
        for kinds in (("resident", "paused"), ("backup",))
        for process in gpu.ordinals
    ]
    return [resident, *of_processes]


class _Tags:
    """Numbers of tags, so that the data has each text once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, tag: str) -> int:
        if tag not in self._numbers:
            self._numbers[tag] = len(self.names)
            self.names.append(tag)
        return self._numbers[tag]


def _data(hosts: Sequence[Host]) -> dict[str, Any]:
    tags = _Tags()
    notes: list[str] = []
    gpus = sum(len(host.gpus) for host in hosts)
    processes = sum(len(host.logs) for host in hosts)
    shown = [
        _host(
            host,
            tags,
            _MOST_ROWS // max(gpus, 1),
            _MOST_CALLS // max(processes, 1),
            _MOST_FAILURES // max(processes, 1),
            notes,
        )
        for host in hosts
    ]
    return {"hosts": shown, "tags": tags.names, "notes": notes}


def _host(host: Host, tags: _Tags, most_rows: int, most_calls: int, most_failures: int, notes: list[str]) -> dict[str, Any]:
    notes += _notes(host)
    return {
        "name": host_name(host),
        "beginMs": (host.begin_ns + host.wall_offset_ns) / _NS_PER_MS,
        "length": host.end_ns - host.begin_ns,
        "gpus": [_gpu(gpu, host, tags, most_rows, notes) for gpu in host.gpus],
        "processes": [_process(host, number, tags, most_calls, most_failures, notes) for number in range(len(host.logs))],
    }


def _notes(host: Host) -> Iterator[str]:
    for log in host.logs:
        name = process_name(log, host)
        if not log.events:
            yield f"{name} has no event."
        elif log.dropped:
            yield (
                f"{name}: the ring dropped {log.dropped:,} earlier events. Levels are true from the first kept one on, and "
                "unknown before."
            )
    if not host.logs[0].boot_id:
        yield f"{process_name(host.logs[0], host)} has no boot id, so it is drawn by itself."
    for gpu in host.gpus:
        if not gpu.uuid and len(host.logs) > 1:
            name = process_name(host.logs[min(gpu.ordinals)], host)
            yield f"{gpu_name(gpu)} of {name} has no UUID, so it is drawn by itself."


def _gpu(gpu: Gpu, host: Host, tags: _Tags, most: int, notes: list[str]) -> dict[str, Any]:
    rows = reduced(gpu.rows, len(gpu.bands), stacks_of(gpu), host.begin_ns, host.end_ns, most)
    if len(rows) < len(gpu.rows):
        notes.append(
            f"{gpu_name(gpu)}: {len(rows):,} of {len(gpu.rows):,} changes are drawn. The highest levels are among them; a "
            "large zoom lacks details."
        )
    before = 0
    times = []
    for time_ns, _, _ in rows:
        at = time_ns - host.begin_ns
        times.append(at - before)
        before = at
    return {
        "name": gpu_name(gpu),
        "uuid": gpu.uuid,
        "total": gpu.total_bytes,
        "ordinals": list(gpu.ordinals.items()),
        "bands": [
            [band.process, band.kind, -1 if band.process == OTHER or band.folded else tags[band.tag], band.folded]
            for band in gpu.bands
        ],
        "stacks": stacks_of(gpu),
        "times": times,  # each the difference to the one before it
        "of": [band for _, band, _ in rows],
        "bytes": [size for _, _, size in rows],
    }


def _process(host: Host, number: int, tags: _Tags, most_calls: int, most_failures: int, notes: list[str]) -> dict[str, Any]:
    log = host.logs[number]
    name = process_name(log, host)
    calls = calls_of(log)
    kept = _most_important(calls, most_calls)
    failures = failures_of(log)
    if len(kept) < len(calls):
        notes.append(f"{name}: {len(kept):,} of {len(calls):,} calls are drawn, those that failed and the longest.")
    if len(failures) > most_failures:
        notes.append(f"{name}: the last {most_failures:,} of {len(failures):,} failures outside of calls are drawn.")
    return {
        "name": name,
        "begin": log.begin_ns - host.begin_ns,
        "taken": log.taken_ns - host.begin_ns,
        "exited": log.exited,
        "dropped": log.dropped,
        "calls": [_call(call, host, tags) for call in kept],
        "failures": [
            {
                "at": one.time_ns - host.begin_ns,
                "device": one.device,
                "what": one.what,
                "tag": tags[one.tag],
                "bytes": one.bytes,
                "status": one.status,
                "result": one.driver_result,
            }
            for one in failures[-most_failures:]
        ],
    }


def _most_important(calls: Sequence[Call], most: int) -> list[Call]:
    if len(calls) <= most:
        return list(calls)
    numbers = nsmallest(
        most,
        range(len(calls)),
        key=lambda number: (
            calls[number].finished and calls[number].status == "OK",
            calls[number].began_ns - calls[number].ended_ns,
        ),
    )
    return [calls[number] for number in sorted(numbers)]


def _call(call: Call, host: Host, tags: _Tags) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "what": call.operation,
        "at": call.began_ns - host.begin_ns,
        "ns": call.ended_ns - call.began_ns,
        "tags": sorted({tags[tag] for tag, _ in call.tags}),
        "devices": _devices(call),
        # [name, device, begin after that of the call, duration, time inside, bytes, status]
        "phases": [
            [
                one.name,
                one.device,
                one.began_ns - call.began_ns,
                one.ended_ns - one.began_ns,
                one.busy_ns,
                one.bytes,
                one.status,
            ]
            for one in call.phases
        ],
    }
    optional = {
        "allocations": call.allocations,
        "bytes": call.bytes,
        "copied": call.copied_bytes,
        "status": "" if call.status == "OK" else call.status,
        "result": call.driver_result,
        "unfinished": not call.finished,
    }
    return shown | {name: value for name, value in optional.items() if value}


def _devices(call: Call) -> list[int]:
    """The devices that the call concerned; none: it does not say."""
    named: Iterable[int] = (*(device for _, device in call.tags), *(phase.device for phase in call.phases))
    return sorted({device for device in named if device >= 0})
