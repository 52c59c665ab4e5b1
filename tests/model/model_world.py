"""The model: what there is and what it holds, in plain Python; and the comparison of all of it with the native core.

A World drives one process's core. Every operation (OPERATIONS, FAILING, THREADED) decides what to do, does it, says it in
`steps`, and says what it should have changed. `check` then compares: the states, the sizes, every byte of what is resident,
every byte of what has a host backup, the files, the counters, and what the simulated GPU says is allocated.

`clean` is False from an injected failure until everything has been tried again: meanwhile the driver may still hold what it
refused to take back, so sums are not compared. States and bytes always are.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from model_machine import GRANULARITY, MIB, POISON, Machine, first_difference, holds
from settling import wait_for_host_memory

from torch_memory_saver import _core, errors

#: Nobody else's: a tag that has been allocated with once is known to the process for good.
TAGS = ("model weights", "model cache", "model graph")
BACKUPS = (_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP, _core.BACKUP_DISK)
BACKUP_NAMES = dict(zip(BACKUPS, ("none", "pinned", "mmap", "disk"), strict=True))
STATE_NAMES = ("ACTIVE", "PAUSING", "PAUSED", "RESUMING", "DAMAGED")
ACTIVE, PAUSED, DAMAGED = _core.STATE_ACTIVE, _core.STATE_PAUSED, _core.STATE_DAMAGED
ON_HOST = (_core.BACKUP_PINNED, _core.BACKUP_MMAP)
DEVICES = 2
#: What the machine leaves to this process on each device: little, so that memory runs out.
ROOM = 48 * MIB
MAX_ALLOCATIONS = 14
STEPS_KEPT = 400
RECLAIM_SECONDS = 60

Tags = tuple[str, ...] | None

_POISON: dict[int, bytes] = {}
#: Of idle host memory; TMS_HOST_POOL_LIMIT_MB, which the core reads once.
pool_limit = int(os.environ.get("TMS_HOST_POOL_LIMIT_MB") or 1 << 30) * MIB
#: Tags that this process has ever allocated with: the core remembers them.
used_tags: set[str] = set()


def poison(size: int) -> bytes:
    """What new physical memory holds on the simulated GPU."""
    if size not in _POISON:
        if len(_POISON) > 64:
            _POISON.clear()
        _POISON[size] = bytes([POISON]) * size
    return _POISON[size]


def selects(tags: Tags, tag: str) -> bool:
    return tags is None or tag in tags


Ranges = list[tuple[int, int]]


@dataclass
class PauseChoice:
    """How a pause is called: where contents go in spite of the region, and what is live of some allocations."""

    backup: int | None = None
    live: dict[int, Ranges] | None = None  # by address; of others everything is

    def kind(self, allocation: Allocation) -> int:
        if self.backup is None or (self.backup == _core.BACKUP_PINNED and allocation.backup == _core.BACKUP_MMAP):
            return allocation.backup
        return self.backup

    def kept(self, allocation: Allocation) -> Ranges:
        """What the pause keeps of it."""
        kind = self.kind(allocation)
        if kind == _core.BACKUP_NONE:
            return []
        if self.live is not None and allocation.address in self.live:
            return merged(self.live[allocation.address])
        return [(0, allocation.size)]

    def copied(self, allocation: Allocation) -> int:
        return total(self.kept(allocation))


@dataclass
class ResumeChoice:
    host_policy: int = _core.HOST_DEFAULT
    zero: bool = False


def total(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def merged(ranges: Ranges) -> Ranges:
    """Without the empty ones, and touching ones as one."""
    result: Ranges = []
    for begin, end in ranges:
        if result and result[-1][1] == begin and begin < end:
            result[-1] = (result[-1][0], end)
        elif begin < end:
            result.append((begin, end))
    return result


@dataclass(eq=False)
class Allocation:
    name: int
    address: int
    size: int
    device: int
    tag: str
    backup: int
    contents: bytes | None  # what it holds, or held when it was paused; None: lost
    policy: int = _core.HOST_DEFAULT
    state: int = ACTIVE
    buffer: int = 0  # bytes of its host buffer
    saved: int = _core.BACKUP_NONE  # where its contents are, or are retained
    kept: Ranges = field(default_factory=list)  # of them, if saved
    copy: bytes | None = None  # the contents that `kept` are parts of, if they are in host memory
    file: bool = False

    @property
    def reserved(self) -> int:
        return -(-self.size // GRANULARITY) * GRANULARITY

    @property
    def whole_copy(self) -> bytes | None:
        return self.copy if self.kept == [(0, self.size)] else None

    def __repr__(self) -> str:
        return f"#{self.name}"

    def described(self) -> str:
        return (
            f"#{self.name} at {self.address:#x}: {self.size} bytes on device {self.device}, tag {self.tag!r}, "
            f"backup {BACKUP_NAMES[self.backup]}, {STATE_NAMES[self.state]}"
        )

    def row(self) -> tuple[int, int, int, int, int, int, int, str]:
        """What _core.segments() says of it."""
        held = total(self.kept) if self.saved else self.size * self.file
        backup_bytes = held if self.state in (ACTIVE, PAUSED) else 0
        return (self.address, self.size, self.reserved, backup_bytes, self.device, self.state, self.backup, self.tag)

    def becomes_paused(self, state: int, choice: PauseChoice) -> bool:
        """Whether its host buffer, if it had one, is another one now, or none."""
        self.state, self.saved, self.kept = state, choice.kind(self), choice.kept(self)
        on_host, bytes_kept = self.saved in ON_HOST, total(self.kept)
        self.copy = self.contents if on_host else None
        if self.saved == _core.BACKUP_NONE:
            self.contents = None
        to_disk = self.saved == _core.BACKUP_DISK and bytes_kept > 0
        self.file = to_disk or (self.file and self.backup == _core.BACKUP_DISK)
        if on_host and 0 < bytes_kept <= self.buffer:
            return False
        self.buffer = bytes_kept if on_host else 0
        return True

    def becomes_active(self, choice: ResumeChoice, process_policy: int) -> bool:
        """Whether its host buffer has gone."""
        self.state = ACTIVE
        new = bytes(self.size) if choice.zero else poison(self.size)
        if self.contents is None:
            self.contents = new
        elif self.kept != [(0, self.size)]:
            whole = bytearray(new)
            for begin, end in self.kept:
                whole[begin:end] = self.contents[begin:end]
            self.contents = bytes(whole)
        self.file = self.file and self.backup == _core.BACKUP_DISK
        policy = choice.host_policy or self.policy or process_policy
        if policy == _core.HOST_RETAIN and self.saved in ON_HOST:
            return False
        self.loses_backup()
        return True

    def loses_backup(self) -> None:
        self.buffer = 0
        self.loses_contents_of_backup()

    def loses_contents_of_backup(self) -> None:
        self.saved, self.kept, self.copy = _core.BACKUP_NONE, [], None


@dataclass(eq=False)
class View:
    """A HostBuffer that the test holds on to."""

    buffer: Any
    owner: Allocation | None  # whose backup it still is
    address: int
    buffer_bytes: int
    contents: bytes | None


class Worker:
    """A thread that does what it is told, one thing after another."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, results = task
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

    def start(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Begins it; the result is what to call to wait for its end, and get what it returned or raised."""
        results: SimpleQueue[Any] = SimpleQueue()
        self._tasks.put((function, results))

        def join() -> Any:
            result, error = results.get()
            if error is not None:
                raise error
            return result

        return join

    def call(self, function: Callable[[], Any]) -> Any:
        return self.start(function)()

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join()


@dataclass
class Level:
    tag: str
    backup: int
    managed: bool
    policy: int = _core.HOST_DEFAULT


@dataclass
class Actor:
    """A thread: the main one, or a worker."""

    name: str
    worker: Worker | None
    levels: list[Level] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the levels
    bottom: Level = field(default_factory=lambda: Level("default", _core.BACKUP_NONE, False))

    def call(self, function: Callable[[], Any]) -> Any:
        return function() if self.worker is None else self.worker.call(function)


def reclaim_late() -> None:
    """Has what is left of host memory tried again, and waits for that: it happens on a thread of the library's. No work may
    wait on a device."""
    give_up = time.monotonic() + RECLAIM_SECONDS
    while _core.counters()["quarantined_host"]:
        assert time.monotonic() < give_up, "host memory is not taken back"
        _core.resume((), None)
        time.sleep(0)


class World:
    #: The most host memory that was ever reserved, of this process: the pool may grow to it.
    reserved = 0

    def __init__(self, machine: Machine, directory: Path, room: int = ROOM, payload: bytes = b"") -> None:
        self.machine = machine
        self.directories = [directory / "first", directory / "second"]
        self.directory = self.directories[0]
        self.payload = payload
        self.allocations: list[Allocation] = []
        self.views: list[View] = []
        self.steps: deque[str] = deque(maxlen=STEPS_KEPT)
        self.operations = 0
        self.clean = True
        self.rule: tuple[str, int, int, int] | None = None  # the failure that the next operation meets
        self.captures: list[Level | None] = []
        self.deferred: list[Allocation] = []
        self.margin = 0
        self.policy = _core.HOST_RELEASE
        self.pausing, self.resuming = PauseChoice(), ResumeChoice()
        self.freed: deque[int] = deque(maxlen=8)
        self._names = 0
        _core.set_host_policy(self.policy)
        _core.set_memory_margin(0)
        for path in reversed(self.directories):
            _core.set_disk_directory(str(path))
        for device in range(DEVICES):
            with machine.context(device):
                pass
            machine.synchronize(device)
            free, _ = _core.device_memory(device)
            machine.take(device, free - room)
        self.others = [machine.taken[device] // GRANULARITY for device in range(DEVICES)]
        _core.refresh_peers()
        self.actors = [Actor("main", None), Actor("second", Worker()), Actor("third", Worker())]
        tag, backup, managed, depth = _core.region_current()
        assert depth == 0, "another test left a region"
        self._found_settings = (tag, backup, managed)
        self.actors[0].bottom = Level(tag, backup, managed)
        counters = _core.counters()
        assert counters["allocations"] == 0, counters
        self._counted = (counters["allocations_total"], counters["frees_total"])
        self.made = self.given_back = 0
        self._before = [machine.usage(device) for device in range(DEVICES)]

    # What the operations use.

    def say(self, step: str) -> None:
        self.steps.append(step)

    def new_allocation(self, address: int, size: int, device: int, level: Level) -> Allocation:
        self._names += 1
        allocation = Allocation(self._names, address, size, device, level.tag, level.backup, poison(size), level.policy)
        self.allocations.append(allocation)
        self.made += 1
        used_tags.add(level.tag)
        return allocation

    def forget(self, allocation: Allocation) -> None:
        """It was freed."""
        self.allocations.remove(allocation)
        self.given_back += 1
        self.freed.append(allocation.address)
        if allocation not in self.deferred:
            self.detach_views(allocation)

    def detach_views(self, allocation: Allocation) -> None:
        """Its backup is let go: a view that is held keeps it as it is."""
        for view in self.views:
            if view.owner is allocation:
                view.owner = None

    def finish_deferred(self) -> None:
        for allocation in self.deferred:
            self.detach_views(allocation)
        self.deferred.clear()

    def act(self, actor: Actor, function: Callable[[], Any]) -> Any:
        """Does it on the thread, while the call of the rule fails, if there is one."""
        if self.rule is None:
            return actor.call(function)
        self.machine.fail(*self.rule)
        try:
            return actor.call(function)
        finally:
            self.machine.fail(self.rule[0], 0, 0, 0)

    def settings(self, actor: Actor) -> Level:
        """With which an allocation of the thread is made."""
        if actor.levels:
            return actor.levels[-1]
        return next((level for level in reversed(self.captures) if level is not None), actor.bottom)

    def with_state(self, *states: int) -> list[Allocation]:
        return [allocation for allocation in self.allocations if allocation.state in states]

    def selected(self, tags: Tags, *states: int) -> list[Allocation]:
        return [allocation for allocation in self.with_state(*states) if selects(tags, allocation.tag)]

    def free_bytes(self, device: int) -> int:
        return _core.device_memory(device)[0]

    def lacks(self, allocations: list[Allocation]) -> bool:
        """Whether some device has too little memory to resume all of these."""
        need = [sum(a.reserved for a in allocations if a.device == device) for device in range(DEVICES)]
        return any(need[device] > self.free_bytes(device) for device in range(DEVICES))

    def moved_to_active(self, allocations: list[Allocation]) -> None:
        for allocation in allocations:
            if allocation.becomes_active(self.resuming, self.policy):
                self.detach_views(allocation)

    def moved_to_paused(self, allocations: list[Allocation], state: int = PAUSED) -> None:
        for allocation in allocations:
            if allocation.becomes_paused(state, self.pausing):
                self.detach_views(allocation)
            for view in self.views:
                if view.owner is allocation:
                    view.contents = allocation.whole_copy

    def repaired(self) -> None:
        """What every pause and resume does first: damaged allocations are paused ones again, where no call fails."""
        if self.captures:
            return  # nothing may be waited for
        for allocation in self.with_state(DAMAGED):
            allocation.state = PAUSED
        self.finish_deferred()
        self.clean = True

    def observe_states(self, allowed: dict[int, tuple[int, ...]], tags: Tags = None) -> None:
        """Takes over the states that the core says, where the model cannot know which of several it is."""
        rows = {row[0]: row[5] for row in _core.segments()}
        for allocation in self.allocations:
            state = rows.get(allocation.address)
            if state == allocation.state or not selects(tags, allocation.tag):
                continue
            assert state in allowed.get(allocation.state, ()), f"{allocation.described()}: is now {state}"
            if state == ACTIVE:
                self.moved_to_active([allocation])
            elif allocation.state == ACTIVE:
                self.moved_to_paused([allocation], state)
            else:
                allocation.state = state

    def settle(self) -> None:
        """With the cause gone, one more call leaves nothing behind."""
        if self.captures:
            return
        _core.resume((), None)
        self.repaired()

    # The comparison.

    def check(self) -> None:
        """Everything there is, against the core."""
        expected = sorted(allocation.row() for allocation in self.allocations)
        found = sorted(_core.segments())
        assert found == expected, self._differing(expected, found)
        for allocation in self.allocations:
            self.check_contents(allocation)
        for view in self.views:
            if view.contents is not None:
                assert holds(view.address, view.contents), f"view: {first_difference(view.address, view.contents)}"
        self._check_counters()
        self._check_files()
        for actor in self.actors:
            level = actor.levels[-1] if actor.levels else actor.bottom
            current = actor.call(_core.region_current)
            assert current == (level.tag, level.backup, level.managed, len(actor.levels)), (actor, current)
            if self.clean:
                assert actor.call(self._context_left) is None, f"{actor.name}: a context of ours is current"
        for tag in TAGS:
            paused = sum(allocation.state != ACTIVE for allocation in self.allocations if allocation.tag == tag)
            assert _core.tag_info(tag)[0] == paused, (tag, paused)

    def _context_left(self) -> int | None:
        """What is current on this thread, which had no context, after a call that has tried to put that right."""
        for device in range(DEVICES if self.machine.current_context() is not None else 0):
            _core.device_memory(device)  # enters the context of a device that is not current
        return self.machine.current_context()

    def check_contents(self, allocation: Allocation) -> None:
        """Every byte of one allocation and of its host backup."""
        if allocation.state == ACTIVE:
            assert allocation.contents is not None
            assert holds(allocation.address, allocation.contents), (
                f"{allocation.described()}: {first_difference(allocation.address, allocation.contents)}"
            )
        whole = allocation.whole_copy if allocation.state != DAMAGED else None
        buffer = _core.host_backup(allocation.address, allocation.size)
        assert (buffer is None) == (whole is None), (
            f"{allocation.described()}: {'no' if buffer is None else 'a'} whole backup"
        )
        if allocation.state == DAMAGED or allocation.copy is None:
            return
        for begin, end in allocation.kept:
            part = _core.host_backup(allocation.address + begin, end - begin)
            assert part is not None, f"{allocation.described()}: has no backup of {begin} to {end}"
            expected = allocation.copy[begin:end]
            assert holds(part.address, expected), (
                f"backup of {begin} to {end} of {allocation.described()}: {first_difference(part.address, expected)}"
            )

    def _differing(self, expected: list[Any], found: list[Any]) -> str:
        lines = [f"  the core has {row}" for row in found if row not in expected]
        return "\n".join(["allocations differ:", *lines, *(f"  should be   {row}" for row in expected if row not in found)])

    def _check_counters(self) -> None:
        counters = _core.counters()
        existing = [*self.allocations, *self.deferred]
        host = sum(a.buffer for a in existing)
        detached = {view.address: view.buffer_bytes for view in self.views if view.owner is None}
        expected = {
            "allocations": len(self.allocations),
            "allocations_total": self._counted[0] + self.made,
            "frees_total": self._counted[1] + self.given_back,
            "paused_bytes": sum(a.reserved for a in self.with_state(PAUSED)),
            "damaged": len(self.with_state(DAMAGED)),
            "visible_captures": len(self.captures),
        }
        if self.clean:
            expected |= {
                "host_backup_bytes": host + sum(detached.values()),
                "disk_backup_bytes": sum(a.size for a in existing if a.file),
                "resident_bytes": sum(a.reserved for a in self.with_state(ACTIVE)),
                "deferred_frees": len(self.deferred),
                "quarantined_handles": 0,
                "quarantined_ranges": 0,
            }
        # During a capture it waits: a thread of the library's may have met a failure later than the last call before that.
        while self.clean and not self.captures and counters["quarantined_host"]:
            reclaim_late()
            counters = _core.counters()
        # What disk copies go through has events beside its memory, which wait with it.
        if self.clean and not counters["quarantined_host"]:
            expected["quarantined_other"] = 0
        wrong = {name: (counters[name], value) for name, value in expected.items() if counters[name] != value}
        assert not wrong, f"counters (is, should be): {wrong}"
        assert counters["host_pooled_bytes"] <= max(pool_limit, World.reserved), counters
        if not self.clean:
            return
        assert counters["host_resident_bytes"] >= expected["host_backup_bytes"] + counters["host_pooled_bytes"], counters
        for device, before in enumerate(self._before):
            usage = self.machine.usage(device)
            resident = [a for a in [*self.with_state(ACTIVE), *self.deferred] if a.device == device]
            sums = {
                "physical_bytes": sum(a.reserved for a in resident),
                "handles": len(resident),
                "mappings": len(resident),
                "reservations": len(self.allocations) + len(self.deferred),
                "streams": 0,
            }
            wrong = {
                name: (getattr(usage, name) - getattr(before, name), value)
                for name, value in sums.items()
                if getattr(usage, name) - getattr(before, name) != value
            }
            assert not wrong, f"the simulated GPU has (is, should be): {wrong} on device {device}"

    def files(self) -> list[Path]:
        return [path for directory in self.directories for path in directory.glob("*.backup")]

    def _check_files(self) -> None:
        sizes = []
        for path in self.files():
            status = path.stat()
            assert stat.S_IMODE(status.st_mode) == 0o600, path
            sizes.append(status.st_size)
        needed = sorted(a.size for a in [*self.allocations, *self.deferred] if a.file)
        assert sorted(sizes) == needed or not self.clean, f"backup files of {sorted(sizes)} bytes, should be {needed}"

    # The end.

    def end(self) -> None:
        """Frees everything. Nothing is left."""
        self.abandon()
        # Staging memory of disk copies that was refused is not among what the store has resident.
        reclaim_late()
        wait_for_host_memory(_core)
        for device, before in enumerate(self._before):
            usage = self.machine.usage(device)
            for name in ("physical_bytes", "handles", "mappings", "reservations", "streams"):
                assert getattr(usage, name) == getattr(before, name), f"left on device {device}: {name}"
            assert usage.host_bytes <= _core.counters()["host_pooled_bytes"], "left page-locked"
        counters = _core.counters()
        left = {
            name: counters[name]
            for name in counters
            if counters[name]
            and name not in ("host_resident_bytes", "host_pooled_bytes")
            and (name.startswith(("quarantined", "host", "disk", "resident", "paused")) or name == "damaged")
        }
        assert not left, f"left at the end: {left}"
        assert not [path for directory in self.directories for path in directory.iterdir()], "files left at the end"

    def abandon(self) -> None:
        """Puts the process back to where it was, whatever happened."""
        for actor in self.actors:
            actor.call(lambda: _core.region_pop(1))
            if actor.worker is not None:
                actor.worker.end()
        _core.region_set(*self._found_settings)
        while _core.counters()["visible_captures"]:
            _core.capture_end()
        self.views.clear()
        for row in _core.segments():
            _core.free(row[0])
        _core.resume((), None)
        for device, taken in self.machine.taken.items():
            if taken:
                self.machine.take(device, -taken)
        _core.set_memory_margin(0)
        _core.set_host_policy(_core.HOST_RELEASE)


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


#: What an injected failure may become.
FAILURES = (
    errors.OutOfMemoryError,
    errors.OutOfHostMemoryError,
    errors.BackupIOError,
    errors.DriverError,
    errors.DriverUnavailableError,
    errors.InvalidStateError,
    errors.InvalidArgumentError,
)
