"""The content of `top`, as plain values: pages and NVML combined by GPU. This module reads nothing, and gets the time as an
argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_memory_saver._text import binary_size
from torch_memory_saver.observe._nvml import DeviceProcess, Gpu, Gpus
from torch_memory_saver.observe._processes.shared_pages import Page, PageDevice, Pages, Row

__all__ = [
    "FORMAT",
    "GpuView",
    "ProcessView",
    "Program",
    "StoreView",
    "TagView",
    "View",
    "as_json",
    "make_view",
    "pages_on",
]

#: Version of the format of :func:`as_json`. It increases with each change that breaks a reader.
FORMAT = 1
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class TagView:
    """The allocations of one tag of one process on one GPU. Ages and durations are in seconds, and None if there was no such
    call.

    Attributes:
        tag: Tag of the allocations; "" for tags that have no row of their own in the page.
        state: "resident", "paused", "partly", "damaged" or "empty".
    """

    tag: str
    state: str
    allocations: int
    resident_bytes: int
    paused_bytes: int
    slack_bytes: int
    host_backup_bytes: int
    disk_backup_bytes: int
    shared_backup_bytes: int
    last_pause_age: float | None
    last_pause_seconds: float | None
    last_resume_age: float | None
    last_resume_seconds: float | None
    pauses_total: int
    resumes_total: int
    failures_total: int


@dataclass(frozen=True)
class ProcessView:
    """One process on one GPU.

    Attributes:
        pid: Number of the process, from NVML or from the process itself.
        name: Name of the process; "" if it is unknown.
        user: Owner of the process; "" if it is unknown.
        managed: Whether the process has a page.
        foreign: Whether the process is in another PID namespace, where `pid` is its number.
        used_bytes: Bytes of the GPU's memory that the process uses, from NVML; None if unknown.
        state: State of all its tags together; "pausing" or "resuming" while it moves allocations; "" without a page.
        failures_total: Number of failed pauses, resumes and allocations of the whole process.
    """

    pid: int
    name: str
    user: str
    rank: int | None
    managed: bool
    foreign: bool
    used_bytes: int | None
    state: str
    resident_bytes: int
    paused_bytes: int
    slack_bytes: int
    host_backup_bytes: int
    disk_backup_bytes: int
    shared_backup_bytes: int
    last_pause_age: float | None
    last_resume_age: float | None
    failures_total: int
    tags: tuple[TagView, ...]


@dataclass(frozen=True)
class GpuView:
    """One GPU. Bytes that are None are unknown.

    Attributes:
        index: Index that NVML gives the GPU; None if only a process names this GPU.
        mig: Number that NVML gives the MIG device on that GPU; None for a whole GPU.
        total_bytes: Size of the memory from NVML, or else from the driver of a process.
        slack_bytes: Bytes of device memory that freed allocations have left in runs.
        other_bytes: Used bytes that are neither resident memory of a managed tag nor slack. Paused memory is not used.
    """

    index: int | None
    mig: int | None
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    resident_bytes: int
    paused_bytes: int
    slack_bytes: int
    other_bytes: int | None
    processes: tuple[ProcessView, ...]


@dataclass(frozen=True)
class StoreView:
    """The shared store of this user on this machine.

    Attributes:
        bytes: Bytes of all objects, finished or not. They are the sizes of the folder's files and not the sum of
            `shared_backup_bytes` of the processes, so an object counts once, however many processes hold it.
        objects: Number of objects.
        processes: Number of live processes that use the store.
    """

    path: str
    bytes: int
    objects: int
    processes: int


@dataclass(frozen=True)
class View:
    """The state of all GPUs at one moment.

    Attributes:
        gpus: GPUs, each with its processes.
        store: Shared store; None if there is none, or if it cannot be read.
        notes: A sentence for each missing piece of information.
    """

    gpus: tuple[GpuView, ...]
    store: StoreView | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The name and the user of a process as the system reports them; "" if unknown."""

    name: str
    user: str


_UNKNOWN = Program("", "")


def make_view(
    pages: Pages,
    gpus: Gpus,
    now_ns: int,
    programs: Mapping[int, Program],
    store: StoreView | None = None,
    unreadable: Mapping[str, str] | None = None,
) -> View:
    """Combine pages and GPUs.

    Args:
        now_ns: Current time on the monotonic clock.
        programs: Programs by the numbers of processes in this PID namespace. The name in a page takes precedence.
        store: Shared store.
        unreadable: Why other files could not be read, by path.
    """
    known = {_key(gpu.uuid): gpu for gpu in gpus.gpus}
    named = {
        _key(device.uuid): device for page in pages.pages for device in page.devices if _rows_on(page, _key(device.uuid))
    }
    views = [_gpu_view(key, known.get(key), named.get(key), pages.pages, now_ns, programs) for key in {**known, **named}]
    views.sort(key=lambda view: (view.index is None, view.index or 0, view.mig or 0, view.uuid))
    notes = [gpus.missing] if gpus.missing else []
    notes += [f"{path} is not shown: {why}" for path, why in {**pages.unreadable, **(unreadable or {})}.items()]
    notes += [
        _not_shown(page, row)
        for page in pages.pages
        for row in page.rows
        if row.allocations and not _has_known_gpu(page, row)
    ]
    return View(tuple(views), store, tuple(notes))


def pages_on(pages: Pages, gpus: Gpus) -> Pages:
    """Return the pages without those of processes that use other GPUs only."""
    known = {_key(gpu.uuid) for gpu in gpus.gpus}
    kept = (page for page in pages.pages if not page.devices or any(_key(device.uuid) in known for device in page.devices))
    return dataclasses.replace(pages, pages=tuple(kept))


def as_json(view: View) -> dict[str, Any]:
    """Return an object for ``json.dumps()``."""
    return {"format": FORMAT, **dataclasses.asdict(view)}


def _key(uuid: str) -> str:
    """Return the part of a UUID that is the same in every UUID of one GPU. A process does not know that its GPU is a MIG
    device, for which NVML writes "MIG-" in place of "GPU-"."""
    return uuid.partition("-")[2]


def _rows_on(page: Page, key: str) -> list[Row]:
    """Return the rows of a process on a GPU. Rows without a device count if it is the only GPU that the process sees."""
    ordinals = {ordinal for ordinal, device in enumerate(page.devices) if _key(device.uuid) == key}
    if len(page.devices) == len(ordinals):
        ordinals.add(-1)
    return [row for row in page.rows if row.device in ordinals]


def _has_known_gpu(page: Page, row: Row) -> bool:
    return row.device >= 0 or len({device.uuid for device in page.devices}) == 1


def _not_shown(page: Page, row: Row) -> str:
    sizes = f"resident {binary_size(row.resident_bytes)}, paused {binary_size(row.paused_bytes)}"
    return (
        f"process {page.pid} has {row.allocations} more allocations ({sizes}), which no GPU shows: its page has no line "
        "left for their tags, and does not say on which of its GPUs they are"
    )


def _gpu_view(
    key: str,
    gpu: Gpu | None,
    device: PageDevice | None,
    pages: Iterable[Page],
    now_ns: int,
    programs: Mapping[int, Program],
) -> GpuView:
    """Return the view of a GPU that NVML knows (`gpu`), or that a process names (`device`), or both."""
    used = _used_by_process(gpu.processes if gpu else ())
    processes = []
    for page in pages:
        rows = _rows_on(page, key)
        if rows or (not page.foreign and page.pid in used):
            own = None if page.foreign else used.pop(page.pid, None)
            user = _UNKNOWN.user if page.foreign else programs.get(page.pid, _UNKNOWN).user
            processes.append(_managed(page, rows, own, now_ns, user))
    processes += [_unmanaged(pid, size, programs.get(pid, _UNKNOWN)) for pid, size in used.items()]
    resident = sum(process.resident_bytes for process in processes)
    slack = sum(process.slack_bytes for process in processes)
    in_use = gpu.used_bytes if gpu else None
    return GpuView(
        index=gpu.index if gpu else None,
        mig=gpu.mig if gpu else None,
        uuid=gpu.uuid if gpu else device.uuid if device else "",
        name=gpu.name if gpu else "",
        total_bytes=gpu.total_bytes if gpu and gpu.total_bytes is not None else device.total_bytes if device else None,
        used_bytes=in_use,
        free_bytes=gpu.free_bytes if gpu else None,
        resident_bytes=resident,
        paused_bytes=sum(process.paused_bytes for process in processes),
        slack_bytes=slack,
        other_bytes=None if in_use is None else max(in_use - resident - slack, 0),
        processes=tuple(processes),
    )


def _used_by_process(processes: Iterable[DeviceProcess]) -> dict[int, int | None]:
    """Return the bytes of each process, added up over all rows that NVML has for it."""
    used: dict[int, int | None] = {}
    for process in processes:
        before = used.get(process.pid, 0)
        used[process.pid] = None if before is None or process.bytes is None else before + process.bytes
    return used


def _managed(page: Page, rows: list[Row], used: int | None, now_ns: int, user: str) -> ProcessView:
    counters = page.counters
    return ProcessView(
        pid=page.pid,
        name=page.name,
        user=user,
        rank=page.rank,
        managed=True,
        foreign=page.foreign,
        used_bytes=used,
        state={"pause": "pausing", "resume": "resuming"}.get(page.running) or _state_of(rows),
        resident_bytes=sum(row.resident_bytes for row in rows),
        paused_bytes=sum(row.paused_bytes for row in rows),
        slack_bytes=sum(row.slack_bytes for row in rows),
        host_backup_bytes=sum(row.host_backup_bytes for row in rows),
        disk_backup_bytes=sum(row.disk_backup_bytes for row in rows),
        shared_backup_bytes=sum(row.shared_backup_bytes for row in rows),
        last_pause_age=_age(counters["last_pause_ended"], now_ns),
        last_resume_age=_age(counters["last_resume_ended"], now_ns),
        failures_total=sum(counters[f"failed_{what}_total"] for what in ("pauses", "resumes", "allocations")),
        tags=tuple(_tag(row, now_ns) for row in rows),
    )


def _unmanaged(pid: int, used: int | None, program: Program) -> ProcessView:
    return ProcessView(
        pid=pid,
        name=program.name,
        user=program.user,
        rank=None,
        managed=False,
        foreign=False,
        used_bytes=used,
        state="",
        resident_bytes=0,
        paused_bytes=0,
        slack_bytes=0,
        host_backup_bytes=0,
        disk_backup_bytes=0,
        shared_backup_bytes=0,
        last_pause_age=None,
        last_resume_age=None,
        failures_total=0,
        tags=(),
    )


def _tag(row: Row, now_ns: int) -> TagView:
    return TagView(
        tag=row.tag,
        state=row.state,
        allocations=row.allocations,
        resident_bytes=row.resident_bytes,
        paused_bytes=row.paused_bytes,
        slack_bytes=row.slack_bytes,
        host_backup_bytes=row.host_backup_bytes,
        disk_backup_bytes=row.disk_backup_bytes,
        shared_backup_bytes=row.shared_backup_bytes,
        last_pause_age=_age(row.last_pause_ended, now_ns),
        last_pause_seconds=row.last_pause_nanoseconds / _NANOSECONDS if row.last_pause_ended else None,
        last_resume_age=_age(row.last_resume_ended, now_ns),
        last_resume_seconds=row.last_resume_nanoseconds / _NANOSECONDS if row.last_resume_ended else None,
        pauses_total=row.pauses_total,
        resumes_total=row.resumes_total,
        failures_total=row.failures_total,
    )


def _state_of(rows: list[Row]) -> str:
    states = {row.state for row in rows} - {"empty"}
    if "damaged" in states or len(states) == 1:
        return "damaged" if "damaged" in states else states.pop()
    return "partly" if states else "empty"


def _age(ended_ns: int, now_ns: int) -> float | None:
    return max(now_ns - ended_ns, 0) / _NANOSECONDS if ended_ns else None
