"""The data of the page, and its text for readers without JavaScript.

Large inputs are reduced to a bounded size without a change of the picture, and the page says what was omitted. The rows of
a GPU are cut into groups, by time and by number. Each group keeps the moments at which a stack is highest, and its last
moment. So the highest value of a stack in each cell of time is kept, at its true time, and so is the level after each group.

Pure functions of logs, without state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest, nsmallest
from typing import Any

from torch_memory_saver import _text
from torch_memory_saver.observe._html import Document
from torch_memory_saver.observe.events.log import EventLog
from torch_memory_saver.observe.events.timeline.levels import KINDS, Call, calls_of, failures_of
from torch_memory_saver.observe.events.timeline.merge import OTHER, Gpu, Host, Row

__all__ = ["CELLS", "gpu_name", "host_name", "page", "process_name", "reduced", "stacks_of", "table"]

_PAGE = Document(__package__, "template.html", ("columns.js", "pictures.js", "views.js"), ("style.css",))
#: Maximum numbers of changes of levels, of calls, and of failures outside of calls on a page.
_MAX_ROWS = 240_000
_MAX_CALLS = 12_000
_MAX_FAILURES = 2_000
#: Maximum number of table rows for a machine: the rows with the highest peaks.
_MAX_TABLE_ROWS = 400
_NS_PER_MS = 1_000_000
#: Number of cells of time: at least one for each column of pixels in a picture of the whole time.
CELLS = 2048
#: Estimated number of bands that change from one kept moment to the next.
_ROWS_OF_A_MOMENT = 3
_TABLE_HEADS = ("process", "device", "tag", *(f"{kind} {when}" for kind in KINDS for when in ("peak", "end")))


def page(hosts: Sequence[Host]) -> str:
    """Return the page as HTML."""
    return _PAGE.page(_data(hosts), {"TABLE": table(hosts)})


def stacks_of(gpu: Gpu) -> list[list[int]]:
    """Return the bands of a GPU that are drawn on top of each other, by their numbers.

    The first stack is the memory on the GPU. Then there is one stack for each process with its resident and paused memory,
    and one for each process with its backups.
    """
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
            _MAX_ROWS // max(gpus, 1),
            _MAX_CALLS // max(processes, 1),
            _MAX_FAILURES // max(processes, 1),
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
        "unchanged": call.unchanged_bytes,
        "status": "" if call.status == "OK" else call.status,
        "result": call.driver_result,
        "unfinished": not call.finished,
    }
    return shown | {name: value for name, value in optional.items() if value}


def _devices(call: Call) -> list[int]:
    """Return the devices that the call concerned.

    The list is empty if the call names no device.
    """
    named: Iterable[int] = (*(device for _, device in call.tags), *(phase.device for phase in call.phases))
    return sorted({device for device in named if device >= 0})


def process_name(log: EventLog, host: Host) -> str:
    """Return a readable name of a process, with the name of its container if the host has several names."""
    rank = "" if log.rank is None else f", rank {log.rank}"
    return _text.printable(f"{log.role}{rank}, pid {log.pid}" + (f" on {log.host}" if len(host.names) > 1 else ""))


def host_name(host: Host) -> str:
    """Return a readable name of a machine."""
    return _text.printable(", ".join(host.names))


def gpu_name(gpu: Gpu) -> str:
    """Return a readable name of a GPU, with the ordinals that its processes give it."""
    ordinals = sorted(set(gpu.ordinals.values()))
    return f"GPU {' or '.join(map(str, ordinals))}"


def table(hosts: Sequence[Host]) -> str:
    """Return the table as text, in MiB.

    The end values are those at the end of each log: after an exit nothing is held.
    """
    lines = []
    for host in hosts:
        found = list(_table_rows(host))
        shown = set(nlargest(_MAX_TABLE_ROWS, range(len(found)), key=lambda number: found[number][0]))
        rows = [_TABLE_HEADS, *(row for number, (_, row) in enumerate(found) if number in shown)]
        lines.append(f"{host_name(host)} (MiB)")
        lines += _text.table(rows, left=3)
        if len(shown) < len(found):
            lines.append(f"and {len(found) - len(shown)} rows more, of lower peaks")
        lines.append("")
    return "\n".join(lines)


def _table_rows(host: Host) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each row of the table as (highest level in the row, cells of the row)."""
    for log, changes in zip(host.logs, host.changes, strict=True):
        peaks: dict[tuple[int, str], dict[str, int]] = {}
        ends: dict[tuple[int, str], dict[str, int]] = {}
        for change in changes:
            key = (change.device, change.tag)
            held = peaks.setdefault(key, dict.fromkeys(KINDS, 0))
            held[change.kind] = max(held[change.kind], change.bytes)
            ends.setdefault(key, dict.fromkeys(KINDS, 0))[change.kind] = change.bytes
        for device, tag in sorted(peaks):
            sizes = [at[device, tag][kind] for kind in KINDS for at in (peaks, ends)]
            texts = (process_name(log, host), str(device), _text.printable(tag), *map(_text.mebibytes, sizes))
            yield max(sizes), texts


def reduced(
    rows: Sequence[Row], bands: int, stacks: Sequence[Sequence[int]], begin_ns: int, end_ns: int, most: int
) -> list[Row]:
    """Return at most about `most` of the rows, or all of them if there are no more than `most`.

    Args:
        rows: Rows in the order of time.
        bands: Number of bands.
        stacks: Numbers of the bands that are drawn on top of each other, for each stack.
        begin_ns: Time at which the picture begins.
        end_ns: Time at which the picture ends.
        most: Number of rows to keep. Each cell of time keeps a moment for each stack even if that makes more rows.
    """
    if len(rows) <= most:
        return list(rows)
    stacks_of: list[list[int]] = [[] for _ in range(bands)]
    for number, stack in enumerate(stacks):
        for band in stack:
            stacks_of[band].append(number)
    in_group = max(len(rows) * (len(stacks) + 1) * _ROWS_OF_A_MOMENT // max(most, 1), 1)
    levels, totals, shown = [0] * bands, [0] * len(stacks), [0] * bands
    kept: list[Row] = []
    for start, stop in _groups(rows, begin_ns, max(end_ns - begin_ns, 1), in_group):
        at = start
        for moment in _moments(rows, start, stop, levels, totals, stacks_of):
            changed = {band: size for _, band, size in rows[at : moment + 1]}
            for band, size in changed.items():
                if shown[band] != size:
                    shown[band] = size
                    kept.append((rows[moment][0], band, size))
            at = moment + 1
    return kept


def _groups(rows: Sequence[Row], begin_ns: int, length_ns: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield each group as (number of its first row, number after its last row).

    Rows of one time are not separated.
    """
    start = 0
    while start < len(rows):
        cell = (rows[start][0] - begin_ns) * CELLS // length_ns
        stop = start + 1
        while stop < len(rows) and (
            rows[stop][0] == rows[stop - 1][0]
            or (stop - start < most and (rows[stop][0] - begin_ns) * CELLS // length_ns == cell)
        ):
            stop += 1
        yield start, stop
        start = stop


def _moments(
    rows: Sequence[Row], start: int, stop: int, levels: list[int], totals: list[int], stacks_of: Sequence[Sequence[int]]
) -> list[int]:
    """Return the last rows of the moments at which a stack is highest in the group, and of its last moment.

    The function updates `levels` and `totals` to the end of the group.
    """
    best: dict[int, tuple[int, int]] = {}
    for number in range(start, stop):
        time_ns, band, size = rows[number]
        for stack in stacks_of[band]:
            totals[stack] += size - levels[band]
        levels[band] = size
        if number + 1 < stop and rows[number + 1][0] == time_ns:
            continue
        for stack, total in enumerate(totals):
            if stack not in best or total > best[stack][0]:
                best[stack] = (total, number)
    return sorted({number for _, number in best.values()} | {stop - 1})
