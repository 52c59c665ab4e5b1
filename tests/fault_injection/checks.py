"""Checks after a call with an injected failure: states, contents, counters, the exception and the log."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from blocks import (
    ACTIVE,
    DAMAGED,
    DEVICES,
    DISK,
    GUARD_PAGE,
    PAUSED,
    SHARED,
    STATE_NAMES,
    Block,
)
from machine import DRIVER, OUT_OF_MEMORY, Fault
from step import Outcome, Step
from tolerated import TOLERATED
from world import World

from torch_memory_saver import _core as core
from torch_memory_saver.errors import DeviceLockedError, TorchMemorySaverError

#: DAMAGED needs one of these failures: the driver fails to unmap, or to release.
REFUSALS = {"cuMemUnmap", "cuMemRelease"}
#: The calls that make a run. Where memory is short for one of them, a resume tries smaller runs.
MAKE_A_RUN = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}

#: The problem with a failure that neither an exception nor the log reports.
UNREPORTED = "the call succeeded, and its failure was not reported"


def read_log() -> str:
    """The lines of the log at the default level: those below warning do not count."""
    lines = Path("/proc/self/fd/2").read_text().splitlines()
    return "\n".join(line for line in lines if "] info: " not in line and "] debug: " not in line)


#: A file of the shared store stays, if one of these fails, until another process cleans up.
REMOVING = {"fstat", "fstatat", "unlinkat"}

#: Counters that change by themselves.
WAITING = ("deferred_frees", "damaged")


def grew(before: Any, after: Any) -> bool:
    return bool(set(after) - set(before) if isinstance(after, list) else after > before)


def is_of_host_memory(name: str) -> bool:
    """About held resources: a failed call may leave a pool larger, to which buffers of fingerprints return as well."""
    return "host_" in name or name in ("mapped bytes", "resident bytes", "blocks of memory")


class CheckedWorld(World):
    """The world, and its checks."""

    @staticmethod
    def unchanged(before: dict[int, int], after: dict[int, int], moved: set[int]) -> list[str]:
        problems = []
        for address in (set(before) & set(after)) - moved:
            # A damaged block becomes whole when the driver releases what it refused.
            if after[address] != before[address] and (before[address], after[address]) != (DAMAGED, PAUSED):
                problems.append(
                    f"{address:#x} went from {STATE_NAMES[before[address]]} to {STATE_NAMES[after[address]]} by a call "
                    "that did not concern it"
                )
        return problems

    def verify_move(
        self,
        tags: tuple[str, ...] | None,
        source: int,
        target: int,
        before: dict[int, int],
        error: BaseException | None,
        failed: set[str],
        damaging: Collection[str] = frozenset(REFUSALS),
    ) -> list[str]:
        """`damaging`: the failures that allow DAMAGED."""
        after = self.states()
        chosen = {
            address
            for address, state in before.items()
            if state in (source, DAMAGED) and (tags is None or self.blocks[address].tag in tags)
        }
        moved = {address for address in chosen if before[address] == source}
        if source == PAUSED:  # a resume also resumes what it finds repaired
            moved |= {address for address in chosen if after.get(address) != DAMAGED}
        # A resume does what it can, and reports that it skipped what is still damaged.
        passed_over = source == PAUSED and any(
            before[address] == DAMAGED and after.get(address) == DAMAGED for address in chosen
        )
        problems = self.unchanged(before, after, chosen)
        if set(after) != set(before):
            return [*problems, "allocations came or went"]
        states = {after[address] for address in moved}
        shown = ", ".join(sorted(STATE_NAMES[state] for state in states)) or "nothing"
        if error is None:
            if states - {target}:
                problems.append(f"the call succeeded and left {shown}")
            if passed_over:
                problems.append("the resume succeeded, and left DAMAGED what was damaged")
        elif DAMAGED in states:
            if not failed & set(damaging):
                problems.append(f"DAMAGED without a refusal of the driver: {shown}")
            if states - {DAMAGED, PAUSED}:
                problems.append(f"beside DAMAGED there may only be PAUSED, not {shown}")
        elif states - {source} and not (passed_over and states == {target}):
            problems.append(f"the call failed and left {shown}")
        return problems

    def check_contents(self) -> list[str]:
        """Every byte of every allocation, on the device or in its backup."""
        problems = []
        files = [path for path in self.directory.rglob("*.backup") if path.stat().st_size]
        for block in self.blocks.values():
            state, name = self.state(block), f"{block.tag}/{block.address:#x}"
            if state == PAUSED and self.machine.is_read_only(block.device, block.address):
                shown = self.machine.holds(block.address, bytes([core.GUARD_BYTE]) * block.size)
                problems += [] if shown else [f"{name} shows other bytes than 0xFF"]
            if state == ACTIVE:
                wrong = block.known and not self._holds(block, block.address)
                problems += [f"contents of {name} are wrong"] if wrong else []
                view = core.host_backup(block.address, block.size)
                if view is not None and (block.saved is None or not self.machine.holds(view.address, block.saved)):
                    problems.append(f"the backup that was retained of {name} is wrong")
            elif not block.known or state == DAMAGED:
                continue
            elif state != PAUSED:
                problems.append(f"{name} is in state {state} after the call")
            elif block.stored == DISK:
                kept = b"".join(block.data[begin:end] for begin, end in block.ranges)
                sized = [path for path in files if path.stat().st_size == block.size]
                if kept and not any(path.read_bytes().startswith(kept) for path in sized):
                    problems.append(f"no backup file holds the contents of {name}")
            elif block.stored == SHARED:
                copy = ctypes.create_string_buffer(block.size)
                if not core.read_backup(block.address, block.size, ctypes.addressof(copy), None) or copy.raw != block.data:
                    problems.append(f"the shared backup of {name} is wrong or missing")
            else:
                problems += self._check_host_backup(block, name)
        return problems

    def _holds(self, block: Block, address: int) -> bool:
        return all(self.machine.holds(address + begin, block.data[begin:end]) for begin, end in block.ranges)

    def _check_host_backup(self, block: Block, name: str) -> list[str]:
        problems = []
        if block.ranges != ((0, block.size),) and core.host_backup(block.address, block.size) is not None:
            problems.append(f"there is a whole backup of {name}, of which a part was kept")
        for begin, end in block.ranges:
            view = core.host_backup(block.address + begin, end - begin)
            if view is None or not self.machine.holds(view.address, block.data[begin:end]):
                problems.append(f"the backup of bytes {begin} to {end} of {name} is wrong or missing")
        return problems

    def check_books(self) -> list[str]:
        """The counters against the states, and against the simulated GPU's usage."""
        counters, rows = core.counters(), core.segments()
        reserved = {state: sum(row.reserved_bytes for row in rows if row.state == state) for state in STATE_NAMES}
        damaged = sum(row.state == DAMAGED for row in rows)
        problems = []
        if {row.address for row in rows} != set(self.blocks):
            problems.append("the allocations listed are not those that their owner has")
        if counters["allocations"] != len(rows) or counters["damaged"] != damaged:
            problems.append(f"counted {counters['allocations']} allocations, {counters['damaged']} damaged: {rows}")
        if counters["paused_bytes"] != reserved[PAUSED]:
            problems.append(f"paused_bytes {counters['paused_bytes']}, really {reserved[PAUSED]}")
        if not reserved[ACTIVE] <= counters["resident_bytes"] <= reserved[ACTIVE] + reserved[DAMAGED]:
            problems.append(f"resident_bytes {counters['resident_bytes']}, really {reserved[ACTIVE]}")
        physical = sum(self.machine.physical_bytes(device) for device in range(DEVICES))
        waiting = any(counters[name] for name in ("quarantined_handles", *WAITING))
        # A device has a guard page, and only then, if something is guarded there.
        pages = physical - counters["resident_bytes"] - counters["slack_bytes"]
        allowed = {GUARD_PAGE * count for count in range(1, DEVICES + 1)} if counters["guarded_bytes"] else {0}
        if not waiting and pages not in allowed:
            told = f"resident_bytes is {counters['resident_bytes']}, slack_bytes {counters['slack_bytes']}"
            problems.append(f"{physical} bytes of physical memory, and {told}")
        if counters["slack_bytes"] > self.freed_in_runs:
            problems.append(f"slack_bytes {counters['slack_bytes']}, and {self.freed_in_runs} were freed in runs")
        for tag in {block.tag for block in self.blocks.values()}:
            paused = sum(row.state != ACTIVE for row in rows if row.tag == tag)
            if core.tag_info(tag).paused != paused:
                problems.append(f"tag_info says {core.tag_info(tag).paused} of '{tag}' are paused, really {paused}")
        return problems

    @staticmethod
    def check_error(step: Step, error: BaseException, faults: Iterable[Fault]) -> list[str]:
        """The exception must name the call and the code."""
        driver_call, result = getattr(error, "driver_call", ""), getattr(error, "driver_result", 0)
        os_error = getattr(error, "os_error", 0)
        if (driver_call, result) in step.causes:
            return []
        faults = tuple(faults)
        # If everything fails from a call on, another device's thread may reach a failure before that call.
        codes = {fault.code for fault in faults if fault.call.domain == DRIVER} if len(faults) > 2 else set()
        if result in codes and driver_call in str(error):
            return []
        for fault in faults:
            if isinstance(error, DeviceLockedError) and (fault.call.name, fault.code) == ("flock", errno.EWOULDBLOCK):
                return []  # the system reports so that another process holds it
            if isinstance(error, TorchMemorySaverError):
                code = result if fault.call.domain == DRIVER else os_error
                # A call may be counted under several names, depending on its arguments.
                name = fault.call.name.removesuffix("_of_system")
                if driver_call == name and code == fault.code and name in str(error):
                    return []
            elif isinstance(error, MemoryError) and fault.call.name in ("malloc", "calloc", "realloc", "strdup"):
                return []  # Python's own, from the glue code
        named = f"driver_call={driver_call!r}, driver_result={result}, os_error={os_error}"
        return [f"the exception does not name the call and the code: {type(error).__name__}({named}): {error}"]

    @staticmethod
    def check_tolerated(step: Step, fault: Fault, log: str, pinned: bool) -> list[str]:
        """Whether a call may succeed in spite of this failure: silently, or with a line in the log. `pinned`: all host
        memory is pinned; a process reports only once that a piece could not be."""
        if (
            not pinned
            or fault.call.name in TOLERATED
            or fault.call.name in step.tolerates
            or (fault.call.domain == DRIVER and fault.code in step.waits_for)
            or (step.halves and fault.call.name in MAKE_A_RUN and fault.code == OUT_OF_MEMORY)
        ):
            return []
        if fault.call.domain != DRIVER and fault.code in (errno.EINTR, errno.EOPNOTSUPP):
            return []
        return [] if fault.call.name in log else [UNREPORTED]

    # ---- running ----

    def attempt(self, call: Callable[[], None], step: Step, faults: Sequence[Fault]) -> Outcome:
        """One call with `faults` in force, and the checks after it, without them."""
        before, count = self.states(), self.machine.fired()
        held = self.holdings()
        os.ftruncate(2, 0)
        error: BaseException | None = None
        self.armed = True
        self.machine.arm(faults)
        self.machine.record()
        try:
            call()
        except Exception as caught:
            error = caught
        self.machine.settle()
        calls = self.machine.recorded()
        self.machine.disarm()
        self.armed = False
        self.note()
        if self.holds_copies:
            self.machine.drain()  # a copy must see that it was released before the next hold
        fired = self.machine.fired() - count
        log = read_log()
        # The cause is the first of several failures or, on another thread, another one.
        blamed = faults if fired else ()
        problems = step.verify(before, error, {fault.call.name for fault in blamed})
        if error is not None and not step.keeps:
            problems += self.check_kept(held, {fault.call.name for fault in blamed})
        # Last, because to read a shared backup is a call that repairs what is damaged.
        problems += self.check_books() + self.check_contents()
        if error is None:
            # If everything fails from a call on, only that call was certainly reached.
            reported = [fault for fault in blamed if fault is faults[0] or fault.times == 1]
            # Memory awaiting release because of the first failure is released, and the allocation is retried.
            if faults and faults[0].call.name in TOLERATED:
                reported = [fault for fault in reported if (fault.call.name, fault.code) != ("cuMemCreate", OUT_OF_MEMORY)]
            pinned = self.machine.host_bytes() >= core.counters()["host_resident_bytes"]
            # A failed unregistration hides a failed registration.
            pinned &= all(fault.call.name != "cuMemHostUnregister" for fault in blamed)
            unreported = [self.check_tolerated(step, fault, log, pinned) for fault in reported]
            # If everything fails from a call on, the threads determine which failure was reached first.
            reached = len(faults) > 2 and any(fault.call.name in log for fault in faults)
            # One message, as an exception is one.
            reached |= step.logs_its_end and any(fault.call.name in log for fault in reported)
            if (fired >= len(faults) or all(unreported)) and not reached:
                problems += [problem for found in unreported for problem in found]
        elif blamed or step.causes:
            problems += self.check_error(step, error, blamed)
        else:
            problems.append(f"failed without a cause: {type(error).__name__}: {error}")
        return Outcome(error, problems, fired, calls)

    def check_kept(self, before: dict[str, Any], failed: set[str]) -> list[str]:
        """A failed call has kept nothing that it allocated, except what it could not release."""
        after = self.holdings()
        if any(
            held[name] for held in (before, after) for name in after if name in WAITING or name.startswith("quarantined")
        ):
            return []
        return [
            f"the failed call kept {name}: {before[name]}, now {after[name]}"
            for name in after
            if grew(before[name], after[name])
            # Without a thread to release it, host memory waits for the next call.
            and not ((self.pools or self.retains or "pthread_create" in failed) and is_of_host_memory(name))
            and not (name == "shared files" and failed & REMOVING)
            and not (name == "mapped bytes" and "munmap" in failed)  # addresses that were never prefaulted
        ]

    def complete(self) -> list[str]:
        """Without any cause of failure: everything can be resumed, has its contents, and can be freed."""
        problems = []
        for device, size in self.taken.items():
            self.machine.take_memory(device, -size)
        self.taken.clear()
        core.set_host_policy(core.HOST_RELEASE)
        self.margin(0)
        while core.counters()["visible_captures"]:
            core.capture_end()
        self.resume(None)
        if set(self.states().values()) - {ACTIVE}:
            problems.append("a resume of everything left something paused")
        problems += self.check_contents()
        self.guard(False)
        for block in list(self.blocks.values()):
            self.free(block)
        self.reclaim()
        self.machine.settle()
        core.release_host_memory()  # a pool, or the buffer of fingerprints
        self.machine.settle()
        if self.backup_directory != self.directory / "backups":
            self.set_directory(self.directory / "backups")
        return problems
