"""Grouping of logs by machine, and of their contents by GPU.

The functions are pure. Processes belong to one machine if their kernels have the same boot id; they then share the
monotonic clock. A process without a boot id counts as a machine of its own. Processes share a GPU if its UUID is the same.
A device whose UUID is unknown is not shared, because ordinals depend on ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge

from torch_memory_saver.observe.events.log import Device, EventLog
from torch_memory_saver.observe.events.timeline.levels import Change, Sample, changes_of, samples_of

__all__ = ["OTHER", "Band", "Gpu", "Host", "Row", "hosts_of", "same_process"]

#: Process number of the band for memory that no process of the timeline holds.
OTHER = -1
#: Maximum number of tags of a process on a GPU with bands of their own: the tags with the highest peaks. The others share
#: one band.
_MAX_TAGS = 12

#: (time, number of the band, its bytes from then on).
Row = tuple[int, int, int]


@dataclass(frozen=True)
class Band:
    """One quantity over time.

    Attributes:
        process: Number of the process in the host, or OTHER for none of them.
        kind: One of KINDS, or "other".
        tag: Tag of the band; "" if `folded` tags share it.
    """

    process: int
    kind: str
    tag: str
    folded: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host.

    Attributes:
        uuid: UUID of the GPU; "" if it is unknown.
        total_bytes: Size of the GPU's memory; 0 if it is unknown.
        ordinals: CUDA ordinal of the GPU in each process that uses it, by the number of the process.
        bands: Bands that are drawn. The band "other" is the last one, if there are samples of free memory.
        rows: Changes of the bands, in the order of time. Each band begins with 0.
    """

    uuid: str
    total_bytes: int
    ordinals: dict[int, int]
    bands: tuple[Band, ...]
    rows: list[Row]


@dataclass(frozen=True)
class Host:
    """A machine between two of its boots.

    Attributes:
        names: Names of the machine: several if containers have names of their own.
        logs: Logs of the machine's processes.
        changes: Changes of the levels of each process.
        gpus: GPUs that the processes use.
        begin_ns: Begin of the earliest log.
        end_ns: Time at which the last log was taken.
    """

    names: tuple[str, ...]
    logs: tuple[EventLog, ...]
    changes: tuple[Sequence[Change], ...]
    gpus: tuple[Gpu, ...]
    begin_ns: int
    end_ns: int

    @property
    def wall_offset_ns(self) -> int:
        """The nanoseconds to add to the machine's times to get nanoseconds since 1970."""
        return self.logs[0].wall_offset_ns


def hosts_of(logs: Iterable[EventLog]) -> list[Host]:
    """Return the machines, in the order of their first logs, each with its processes by rank and begin."""
    groups: dict[object, list[EventLog]] = {}
    for number, log in enumerate(logs):
        groups.setdefault(log.boot_id or number, []).append(log)
    return [_host(group) for group in groups.values()]


def same_process(one: EventLog, other: EventLog) -> bool:
    """Return whether both are logs of one process at two moments.

    This is certain only if they share an event, because process numbers are reused and containers have numbers of their own.
    """
    if not one.boot_id or (one.boot_id, one.host, one.pid) != (other.boot_id, other.host, other.pid):
        return False
    number = max(one.dropped, other.dropped)
    events = [log.events[number - log.dropped : number - log.dropped + 1] for log in (one, other)]
    return events[0] == events[1] != ()


def _host(group: Sequence[EventLog]) -> Host:
    logs = tuple(sorted(group, key=lambda log: (log.rank is None, log.rank or 0, log.begin_ns, log.pid)))
    of_process = tuple(list(changes_of(log)) for log in logs)
    members: dict[object, dict[int, Device]] = {}
    changes: dict[tuple[int, int], list[Change]] = {}
    for process, log in enumerate(logs):
        ordinals = {sample.device for sample in samples_of(log)}
        for change in of_process[process]:
            changes.setdefault((process, change.device), []).append(change)
            ordinals.add(change.device)
        known = {device.device: device for device in log.devices}
        for ordinal in sorted(ordinals):
            device = known.get(ordinal, Device(ordinal))
            members.setdefault(device.uuid or (process, ordinal), {})[process] = device
    gpus = [_gpu(logs, devices, changes) for devices in members.values()]
    return Host(
        names=tuple(sorted({log.host for log in logs})),
        logs=logs,
        changes=of_process,
        gpus=tuple(sorted(gpus, key=lambda gpu: (min(gpu.ordinals.values()), gpu.uuid, min(gpu.ordinals)))),
        begin_ns=min(log.begin_ns for log in logs),
        end_ns=max(time_ns for log in logs for time_ns in (log.taken_ns, *(event.ended_ns for event in log.events[-1:]))),
    )


def _gpu(logs: Sequence[EventLog], devices: dict[int, Device], changes: dict[tuple[int, int], list[Change]]) -> Gpu:
    bands: list[Band] = []
    series: list[list[Row]] = []
    samples: list[Sample] = []
    for process, device in devices.items():
        own = changes.get((process, device.device), [])
        series.append(_rows_of(process, own, bands))
        samples += (sample for sample in samples_of(logs[process]) if sample.device == device.device)
    rows = list(merge(*series))
    total = max([device.total_bytes for device in devices.values()] + [sample.total_bytes for sample in samples])
    if samples:
        bands.append(Band(OTHER, "other", ""))
        rows = _with_other(rows, sorted(samples), bands, total)
    first = next(iter(devices.values()))
    ordinals = {process: device.device for process, device in devices.items()}
    return Gpu(first.uuid, total, ordinals, tuple(bands), rows)


def _rows_of(process: int, changes: Sequence[Change], bands: list[Band]) -> list[Row]:
    """Return the rows of a process on a GPU, and add its bands.

    The bands are added by tag: the tags with the highest peaks come first.
    """
    peaks: dict[str, int] = {}
    for change in changes:
        peaks[change.tag] = max(peaks.get(change.tag, 0), change.bytes)
    ordered = sorted(peaks, key=lambda tag: (-peaks[tag], tag))
    folded = set(ordered[_MAX_TAGS:]) if len(ordered) > _MAX_TAGS + 1 else set()
    numbers: dict[tuple[str, str], int] = {}
    held: dict[tuple[str, str], int] = {}
    sums: dict[int, int] = {}
    rows: list[Row] = []
    used = {("" if change.tag in folded else change.tag, change.kind) for change in changes}
    for tag in [*(tag for tag in ordered if tag not in folded), *([""] if folded else [])]:
        for kind in ("resident", "paused", "backup"):
            if (tag, kind) in used:
                numbers[tag, kind] = len(bands)
                bands.append(Band(process, kind, tag, 0 if tag else len(folded)))
    for change in changes:
        number = numbers["" if change.tag in folded else change.tag, change.kind]
        key = (change.tag, change.kind)
        sums[number] = sums.get(number, 0) + change.bytes - held.get(key, 0)
        held[key] = change.bytes
        rows.append((change.time_ns, number, sums[number]))
    return rows


def _with_other(rows: Sequence[Row], samples: Sequence[Sample], bands: Sequence[Band], total: int) -> list[Row]:
    """Return the rows together with those of the last band, "other".

    The band has the used memory that the processes do not hold. It is known at each sample. Until the next sample it keeps
    its value, as far as the device has room for it.
    """
    number = len(bands) - 1
    levels = [0] * len(bands)
    resident = other = 0
    known = False
    result: list[Row] = []
    waiting = iter(samples)
    sample = next(waiting, None)
    for row in [*rows, None]:
        while sample is not None and (row is None or sample.time_ns < row[0]):
            other, known = max(sample.total_bytes - sample.free_bytes - resident, 0), True
            result.append((sample.time_ns, number, other))
            sample = next(waiting, None)
        if row is None:
            break
        time_ns, band, size = row
        result.append(row)
        if bands[band].kind == "resident":
            resident += size - levels[band]
        levels[band] = size
        if known and other > max(total - resident, 0):
            other = max(total - resident, 0)
            result.append((time_ns, number, other))
    return result
