"""The model: the allocations and their contents, in plain Python; and the comparison of all of it with the native core.

A World drives one process's core. Every operation (OPERATIONS, FAILING, THREADED) decides what to do, does it, records it in
`steps`, and records its expected effect. `check` then compares (model_comparison.py). `clean` is False from an injected
failure until everything has been retried: meanwhile the driver may still hold what it failed to release, so sums are not
compared. States and bytes always are.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_runs as runs
from core_regions import leave_all_regions
from model_actors import Actor, Level, Worker
from model_allocations import (
    ACTIVE,
    DAMAGED,
    DEVICES,
    PAUSED,
    Allocation,
    PauseChoice,
    ResumeChoice,
    Tags,
    View,
    poison,
    selects,
    used_tags,
)
from model_comparison import compare, reclaim_late
from model_machine import GRANULARITY, MIB, READ_WRITE, Machine
from settling import wait_for_host_memory

from torch_memory_saver import _core, errors

#: The memory that the machine leaves to this process on each device: little, so that it runs out.
ROOM = 48 * MIB
MAX_ALLOCATIONS = 18
#: Of this model alone. Each world has its own, since the core remembers a tag as long as the process lives.
TAGS = ("model weights", "model cache", "model graph")
STEPS_KEPT = 400


class World:
    #: The most host memory that this process ever reserved: the pool may grow to it.
    reserved = 0
    #: The bytes that the pauses of this process did not copy, because they had not changed.
    unchanged = 0
    #: How many worlds this process has had.
    worlds = 0

    def __init__(self, machine: Machine, directory: Path, room: int = ROOM, payload: bytes = b"") -> None:
        self.machine = machine
        self.directories = [directory / "first", directory / "second"]
        self.directory = self.directories[0]
        self.payload = payload
        World.worlds += 1
        self.number = World.worlds
        #: Whether each comparison looks at the host backups. A pause copies all of a backup that was looked at.
        self.looks = self.number % 2 == 0
        self.tags = tuple(f"{tag} {self.number}" for tag in TAGS)
        self.allocations: list[Allocation] = []
        self.leaving: list[Allocation] = []  # their frees wait, on other threads
        self.in_call: list[Allocation] = []  # which a call on another thread is pausing
        self.views: list[View] = []
        self.steps: deque[str] = deque(maxlen=STEPS_KEPT)
        self.operations = 0
        self.clean = True
        self.rule: tuple[str, int, int, int] | None = None  # the failure that the next operation meets
        self.captures: list[Level | None] = []
        self.deferred: list[Allocation] = []
        self.margin = 0
        self.guard = False
        self.policy = _core.HOST_RELEASE
        self.pausing, self.resuming = PauseChoice(), ResumeChoice()
        self.freed: deque[int] = deque(maxlen=8)
        self._names = 0
        _core.set_host_policy(self.policy)
        _core.set_memory_margin(0)
        _core.set_guard(self.guard)
        for path in reversed(self.directories):
            _core.set_disk_directory(str(path))
        for device in range(DEVICES):
            with machine.context(device):
                pass
            machine.synchronize(device)
            machine.take(device, _core.device_memory(device).free - room)
        self.others = [machine.taken[device] // GRANULARITY for device in range(DEVICES)]
        self.in_use = list(range(DEVICES))  # and perhaps others (refill_after_new_device)
        _core.refresh_peers()
        self.actors = [Actor("main", None), Actor("second", Worker()), Actor("third", Worker())]
        found = self._found_settings = _core.region_current()
        assert found.depth == 0, "another test left a region"
        for actor in self.actors:
            self.change_level(actor, Level(f"model bottom {self.number}", _core.BACKUP_NONE, False))
        counters = _core.counters()
        assert counters["allocations"] == 0, counters
        self.guard_failures = counters["guard_failures_total"]
        self.counted = (counters["allocations_total"], counters["frees_total"])
        self.made = self.given_back = 0
        self.before = [machine.usage(device) for device in range(DEVICES)]

    # Used by the operations.

    @staticmethod
    def change_level(actor: Actor, level: Level) -> None:
        actor.call(lambda: _core.region_set(level.tag, level.backup, level.managed, level.policy, level.runs))
        if actor.levels:
            actor.levels[-1] = level
        else:
            actor.bottom = level

    def say(self, step: str) -> None:
        self.steps.append(step)

    def new_allocation(self, address: int, size: int, device: int, level: Level) -> Allocation:
        self._names += 1
        allocation = Allocation(
            self._names, address, size, device, level.tag, level.backup, poison(size), level.policy, level.runs
        )
        if runs.allocated(self, allocation):
            allocation.contents = ctypes.string_at(address, size)  # what was there before
        self.allocations.append(allocation)
        self.made += 1
        used_tags.add(level.tag)
        return allocation

    def forget(self, allocation: Allocation) -> None:
        """It was freed."""
        self.allocations.remove(allocation)
        self.given_back += 1
        self.freed.append(allocation.address)
        if allocation in self.deferred:
            return
        self.detach_views(allocation)
        if allocation.state == ACTIVE:
            runs.freed(self, allocation)

    def detach_views(self, allocation: Allocation) -> None:
        """Its backup is released: a view that is held keeps its contents."""
        for view in self.views:
            if view.owner is allocation:
                view.owner = None

    def finish_deferred(self) -> None:
        for allocation in self.deferred:
            self.detach_views(allocation)
            if allocation.state == ACTIVE:
                runs.freed(self, allocation)
        self.deferred.clear()

    def act(self, actor: Actor, function: Callable[[], Any]) -> Any:
        """Runs the call on the thread, with the failure of the rule, if there is one."""
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
        return _core.device_memory(device).free

    def lacks(self, allocations: list[Allocation]) -> bool:
        """Whether some device has too little memory to resume all of these."""
        need = [sum(a.reserved for a in allocations if a.device == device) for device in range(DEVICES)]
        return any(need[device] > self.room_for(allocations, device) for device in range(DEVICES))

    def check_access(self) -> None:
        """Assert that every device in use may use all resident memory. This holds after an allocation."""
        for allocation in self.with_state(ACTIVE):
            if allocation in self.in_call:
                continue
            for device in self.in_use:
                access = self.machine.access(device, allocation.address)
                assert access == READ_WRITE, f"{allocation.described()}: access of device {device} is {access}"

    # Guard mode.

    def is_guarded(self, allocation: Allocation) -> bool:
        return self.machine.is_guarded(allocation.device, allocation.address)

    def guarded_on(self, device: int) -> list[Allocation]:
        return [one for one in [*self.allocations, *self.deferred] if one.device == device and self.is_guarded(one)]

    def room_for(self, allocations: list[Allocation], device: int) -> int:
        """The memory for these: the guard page of the device goes first, if no other allocation shows it."""
        guarded = self.guarded_on(device)
        page = GRANULARITY if guarded and all(one in allocations for one in guarded) else 0
        return self.free_bytes(device) + page

    def doubt_guards(self, allocations: list[Allocation]) -> None:
        """A call has failed, before or after it unmapped their guard pages; it may have mapped them again."""
        for allocation in allocations:
            allocation.guarded = None

    def moved_to_active(self, allocations: list[Allocation], *, whole: bool = True) -> None:
        """`whole` False: perhaps with others, which were freed meanwhile, or not in the runs that there could be."""
        runs.resumed(self, allocations, whole and self.clean and self.rule is None)
        for allocation in allocations:
            if allocation.becomes_active(self.resuming, self.policy):
                self.detach_views(allocation)

    def moved_to_paused(self, allocations: list[Allocation], state: int = PAUSED) -> None:
        for allocation in allocations:
            allocation.run = None
            self.saved(allocation, state)
            sure = self.clean and self.rule is None and state == PAUSED
            allocation.guarded = self.guard if sure or not self.guard else None

    def saved(self, allocation: Allocation, state: int) -> None:
        """Its contents are where the pause puts them."""
        if allocation.becomes_paused(state, self.pausing):
            self.detach_views(allocation)
        for view in self.views:
            if view.owner is allocation:
                view.contents = allocation.whole_copy

    def repaired(self) -> None:
        """The first step of every pause and resume: damaged allocations become paused, if no call fails."""
        if self.captures:
            return  # nothing may be waited for
        for allocation in self.with_state(DAMAGED):
            allocation.state = PAUSED
        self.finish_deferred()
        self.clean = True

    def observe_states(self, allowed: dict[int, tuple[int, ...]], tags: Tags = None) -> None:
        """Takes over the core's states, if the model cannot know which of several is right."""
        rows = {row.address: row.state for row in _core.segments()}
        for allocation in self.allocations:
            state = rows.get(allocation.address)
            if state == allocation.state or not selects(tags, allocation.tag):
                continue
            assert state in allowed.get(allocation.state, ()), f"{allocation.described()}: is now {state}"
            if state == ACTIVE:
                self.moved_to_active([allocation], whole=False)
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
        """Compares everything with the core."""
        compare(self)

    def files(self) -> list[Path]:
        return [path for directory in self.directories for path in directory.glob("*.backup")]

    # The end.

    def end(self) -> None:
        """Frees everything. Nothing is left."""
        self.abandon()
        # Refused staging memory of disk copies does not count as resident in the store.
        reclaim_late()
        wait_for_host_memory(_core)
        for device, before in enumerate(self.before):
            usage = self.machine.usage(device)
            for name in ("physical_bytes", "handles", "mappings", "reservations", "streams"):
                assert getattr(usage, name) == getattr(before, name), f"left on device {device}: {name}"
            assert usage.host_bytes <= _core.counters()["host_pooled_bytes"], "still pinned"
        counters = _core.counters()
        left = {
            name: counters[name]
            for name in counters
            if counters[name]
            and name not in ("host_resident_bytes", "host_pooled_bytes", "resident_peak_bytes")
            and (name.startswith(("quarantined", "host", "disk", "resident", "paused")) or name == "damaged")
        }
        assert not left, f"left at the end: {left}"
        assert not [path for directory in self.directories for path in directory.iterdir()], "files left at the end"

    def abandon(self) -> None:
        """Resets the process, whatever happened."""
        for actor in self.actors:
            actor.call(lambda: leave_all_regions(_core))
            if actor.worker is not None:
                actor.worker.end()
        found = self._found_settings
        _core.region_set(found.tag, found.backup, found.managed, _core.HOST_DEFAULT, found.runs)
        while _core.counters()["visible_captures"]:
            _core.capture_end()
        self.views.clear()
        for row in _core.segments():
            _core.free(row.address)
        _core.resume((), None)
        for device, taken in self.machine.taken.items():
            if taken:
                self.machine.take(device, -taken)
        for device in self.in_use[DEVICES:]:
            self.machine.reset(device)
        _core.set_memory_margin(0)
        _core.set_host_policy(_core.HOST_RELEASE)
        _core.set_guard(False)


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


#: The possible results of an injected failure.
FAILURES = (
    errors.OutOfMemoryError,
    errors.OutOfHostMemoryError,
    errors.BackupIOError,
    errors.DriverError,
    errors.DriverUnavailableError,
    errors.InvalidStateError,
    errors.InvalidArgumentError,
)
