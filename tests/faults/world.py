"""The world of one injection: the allocations that a scenario makes, what must be true of them, and the calls under test."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import random
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import DRIVER, OUT_OF_MEMORY, Call, Fault, Machine
from tolerated import TOLERATED

from torch_memory_saver import _core as core
from torch_memory_saver.errors import DeviceLockedError, TorchMemorySaverError

NONE, PINNED, MMAP, DISK = core.BACKUP_NONE, core.BACKUP_PINNED, core.BACKUP_MMAP, core.BACKUP_DISK
ON_HOST = (PINNED, MMAP)
ACTIVE, PAUSING, PAUSED = core.STATE_ACTIVE, core.STATE_PAUSING, core.STATE_PAUSED
RESUMING, DAMAGED = core.STATE_RESUMING, core.STATE_DAMAGED
STATE_NAMES = {ACTIVE: "ACTIVE", PAUSING: "PAUSING", PAUSED: "PAUSED", RESUMING: "RESUMING", DAMAGED: "DAMAGED"}

DEVICES, DEVICE_MEMORY = 2, 512 << 20

#: Only these make DAMAGED true: the driver refuses to unmap, or to release.
REFUSALS = {"cuMemUnmap", "cuMemRelease"}

#: What is wrong with a failure of which neither an exception nor the log says anything.
UNTOLD = "the call succeeded, and its failure was told nobody"


def read_log() -> str:
    """The lines of the log that a program gets without asking for more: those of a level below warning do not count."""
    lines = Path("/proc/self/fd/2").read_text().splitlines()
    return "\n".join(line for line in lines if "] info: " not in line and "] debug: " not in line)


#: Counters of what will change by itself.
WAITING = ("deferred_frees", "damaged")


@functools.lru_cache(maxsize=64)
def pattern(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def grew(before: Any, after: Any) -> bool:
    return bool(set(after) - set(before) if isinstance(after, list) else after > before)


def is_of_host_memory(name: str) -> bool:
    """Of what is held: where there is a pool, a call that fails may leave it larger."""
    return "host_" in name or name in ("mapped bytes", "touched bytes", "blocks of memory")


@dataclass
class Block:
    """One allocation. `known`: its contents must be `data`, wherever they are now, in all `ranges`."""

    address: int
    size: int
    tag: str
    kind: int
    device: int
    data: bytes
    known: bool = True
    #: Offsets of what is known, [begin, end).
    ranges: tuple[tuple[int, int], ...] = ()
    #: What a pause would call live, of which it keeps only that.
    live: tuple[tuple[int, int], ...] | None = None
    paused: bool = False
    #: Where the contents went; where the pause that was called last was to put them, and whether it asked what is live.
    stored: int = NONE
    chosen: tuple[int, bool] = (NONE, False)
    #: Whether the resume that was called last was to zero what has no contents.
    zeroed: bool = False
    #: What the last backup in host memory held.
    saved: bytes | None = None

    def __post_init__(self) -> None:
        self.stored, self.chosen, self.ranges = self.kind, (self.kind, False), ((0, self.size),)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, self.size)
        self.data, self.known, self.ranges = data, True, ((0, self.size),)

    def becomes_paused(self) -> None:
        kind, thinned = self.chosen
        self.paused, self.stored = True, kind
        self.known &= kind != NONE
        if kind != NONE and thinned and self.live is not None:
            self.ranges = self.live
        if kind in ON_HOST:
            self.saved = self.data

    def becomes_active(self) -> None:
        self.paused = False
        if not self.zeroed or (self.known and self.ranges == ((0, self.size),)):
            return
        whole = bytearray(self.size)
        for begin, end in self.ranges if self.known else ():
            whole[begin:end] = self.data[begin:end]
        self.data, self.known, self.ranges = bytes(whole), True, ((0, self.size),)


@dataclass
class Outcome:
    """What one call did: the exception it raised, if any, and what is wrong."""

    error: BaseException | None
    problems: list[str]
    fired: int
    calls: list[Call]


@dataclass
class Step:
    """The call under test. `verify` is told the states before, the exception or None, and the names of what failed; `retry`
    is what a user does when the cause of a failure is gone."""

    run: Callable[[], None]
    verify: Callable[[dict[int, int], BaseException | None, set[str]], list[str]]
    retry: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    #: What the call may say beside the injected failure, because it is true: (call, code).
    causes: set[tuple[str, int]] = field(default_factory=set)
    #: Codes of the driver that the call waits out, or that make it wait until later.
    waits_for: set[int] = field(default_factory=set)
    #: Functions that may fail unnoticed in this scenario only.
    tolerates: set[str] = field(default_factory=set)
    #: A failure may leave something made: what is made once a process, or what somebody else freed meanwhile is gone.
    keeps: bool = False
    #: Nobody waits for its end, so that a failure is one message in the log.
    logs_its_end: bool = False


@dataclass
class World:
    machine: Machine
    directory: Path
    tag_suffix: str = ""
    blocks: dict[int, Block] = field(default_factory=dict)
    seed: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    backup_directory: Path = field(init=False)
    holds_copies: bool = False
    #: Calls are counted, and may fail: nothing else is asked of the library meanwhile.
    armed: bool = False
    #: Host memory may be kept for later.
    pools: bool = False

    def __post_init__(self) -> None:
        self.backup_directory = self.directory / "backups"

    # ---- allocations ----

    def allocate(self, size: int, kind: int, tag: str = "a", device: int = 0) -> Block:
        depth = core.region_push(tag + self.tag_suffix, kind, True)
        try:
            address = core.allocate(size, device)
        finally:
            core.region_pop(depth)
        return self.adopt(address, size, kind, tag + self.tag_suffix, device)

    def adopt(self, address: int, size: int, kind: int, tag: str, device: int) -> Block:
        """Takes an allocation into the books, and gives it contents."""
        self.seed += 1
        block = Block(address, size, tag, kind, device, pattern(self.seed, size))
        ctypes.memmove(address, block.data, size)
        self.blocks[address] = block
        return block

    def free(self, block: Block) -> None:
        del self.blocks[block.address]
        assert core.free(block.address) is True, "free did not know the allocation"

    def states(self) -> dict[int, int]:
        return {row[0]: row[5] for row in core.segments()}

    def state(self, block: Block) -> int:
        row = core.find(block.address)
        return row[5] if row else -1

    # ---- the calls ----

    def _tags(self, tags: Iterable[str] | None) -> tuple[str, ...] | None:
        return None if tags is None else tuple(tag + self.tag_suffix for tag in tags)

    def _chosen(self, tags: Iterable[str] | None) -> list[Block]:
        names = self._tags(tags)
        return [block for block in self.blocks.values() if names is None or block.tag in names]

    def pause(
        self, tags: Iterable[str] | None = None, interruptible: bool = False, backup: int | None = None, live: bool = False
    ) -> None:
        """`live`: the core is told which bytes of each block are (`Block.live`; None: all of them)."""
        for block in self._chosen(tags):
            if not block.paused:
                keeps_backend = backup == PINNED and block.kind == MMAP
                block.chosen = (block.kind if backup is None or keeps_backend else backup, live)
        try:
            core.pause(self._tags(tags), None, interruptible, backup, self.find_live if live else None)
        finally:
            self.note()

    def find_live(self) -> tuple[bytes, bytes]:
        thinned = sorted((block for block in self.blocks.values() if block.live is not None), key=lambda one: one.address)
        addresses, ends = array("Q"), array("Q")
        for block in thinned:
            addresses.append(block.address)
            for begin, end in block.live or ():
                ends.extend((block.address + begin, block.address + end))
        return addresses.tobytes(), ends.tobytes()

    def resume(
        self,
        tags: Iterable[str] | None = None,
        interruptible: bool = False,
        timeout: float = 0.0,
        exclusive: bool = False,
        host_policy: int = core.HOST_DEFAULT,
        zero: bool = False,
    ) -> None:
        for block in self._chosen(tags):
            block.zeroed = zero
        try:
            core.resume(self._tags(tags), None, interruptible, timeout, exclusive, host_policy, zero)
        finally:
            self.note()

    def note(self) -> None:
        """Takes over what the last call has moved; while one is under test, only when that is over."""
        if self.armed:
            return
        states = self.states()
        for block in self.blocks.values():
            state = states.get(block.address, -1)
            if block.paused and state == ACTIVE:
                block.becomes_active()
            elif not block.paused and state in (PAUSED, DAMAGED):
                block.becomes_paused()

    def reclaim(self) -> None:
        self.resume(())

    # ---- what scenarios prepare ----

    def cycle(self) -> None:
        self.pause(None)
        self.resume(None)

    def rewrite(self) -> None:
        """Other contents than those that an earlier pause saved."""
        for block in self.blocks.values():
            self.seed += 1
            block.write(pattern(self.seed, block.size))

    def retain(self, on: bool) -> None:
        core.set_retain_backup(on)

    def pool(self) -> None:
        """Host memory is kept for later backups from now on."""
        self.pools = True
        core.set_host_policy(core.HOST_POOL)

    def thin(self, block: Block, *ranges: tuple[int, int]) -> Block:
        block.live = ranges
        return block

    def margin(self, size: int) -> None:
        core.set_memory_margin(size)

    def make_tags(self, count: int = 16) -> None:
        """That no allocation has had."""
        for number in range(count):
            core.region_pop(core.region_push(f"tag {number}{self.tag_suffix}", NONE, True))

    def refresh_peers(self) -> None:
        core.refresh_peers()

    def capture_begin(self, tag: str | None = None) -> None:
        core.capture_begin(tag + self.tag_suffix if tag else None, NONE)

    def capture_end(self) -> None:
        core.capture_end()

    def view(self, block: Block) -> Any:
        return core.host_backup(block.address, block.size)

    def use_device(self, device: int) -> None:
        context = self.machine.retain(device)
        if device == 0:
            self.machine.push(context)

    def fill_device(self, device: int) -> None:
        size = DEVICE_MEMORY - self.machine.physical_bytes(device)
        self.machine.take_memory(device, size)
        self.taken[device] = self.taken.get(device, 0) + size

    def hold(self, block: Block) -> Callable[[], None]:
        """Keeps the device busy until what is returned is called."""
        gate = self.machine.hold_device(block.address)
        return lambda: self.machine.open_gate(gate)

    def hold_copies(self) -> Callable[[], None]:
        self.holds_copies = True
        self.machine.set_bandwidth(1)
        return lambda: self.machine.set_bandwidth(0)

    def damage(self, block: Block) -> None:
        """Lets the driver refuse to unmap this one."""
        self.machine.refuse_once("cuMemUnmap")
        with contextlib.suppress(TorchMemorySaverError):
            self.pause((block.tag.removesuffix(self.tag_suffix),))
        assert self.state(block) == DAMAGED, "the scenario could not damage an allocation"

    def free_refused(self, block: Block) -> None:
        """A free whose memory the driver does not take back at once."""
        self.machine.refuse_once("cuMemUnmap")
        self.free(block)

    def new_directory(self) -> Path:
        """One that does not exist, below one of its own that does."""
        return Path(tempfile.mkdtemp(prefix="above-", dir=self.directory)) / "backups"

    def set_directory(self, directory: Path) -> None:
        core.set_disk_directory(str(directory))
        self.backup_directory = directory

    def remove_directory(self, directory: Path, names: Iterable[str]) -> None:
        for name in names:
            (directory / name).unlink(missing_ok=True)

    # ---- what must be true ----

    @staticmethod
    def unchanged(before: dict[int, int], after: dict[int, int], moved: set[int]) -> list[str]:
        problems = []
        for address in (set(before) & set(after)) - moved:
            # A damaged one becomes whole when the driver takes back what it refused.
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
        """`damaging`: what makes DAMAGED true."""
        after = self.states()
        chosen = {
            address
            for address, state in before.items()
            if state in (source, DAMAGED) and (tags is None or self.blocks[address].tag in tags)
        }
        moved = {address for address in chosen if before[address] == source}
        if source == PAUSED:  # a resume also takes what it finds whole again
            moved |= {address for address in chosen if after.get(address) != DAMAGED}
        # A resume does what it can, and says that it had to pass over what is still damaged.
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
        """The counters against the states, and against what the simulated GPU holds."""
        counters, rows = core.counters(), core.segments()
        reserved = {state: sum(row[2] for row in rows if row[5] == state) for state in STATE_NAMES}
        damaged = sum(row[5] == DAMAGED for row in rows)
        problems = []
        if {row[0] for row in rows} != set(self.blocks):
            problems.append("the allocations listed are not those that their owner has")
        if counters["allocations"] != len(rows) or counters["damaged"] != damaged:
            problems.append(f"counted {counters['allocations']} allocations, {counters['damaged']} damaged: {rows}")
        if counters["paused_bytes"] != reserved[PAUSED]:
            problems.append(f"paused_bytes {counters['paused_bytes']}, really {reserved[PAUSED]}")
        if not reserved[ACTIVE] <= counters["resident_bytes"] <= reserved[ACTIVE] + reserved[DAMAGED]:
            problems.append(f"resident_bytes {counters['resident_bytes']}, really {reserved[ACTIVE]}")
        physical = sum(self.machine.physical_bytes(device) for device in range(DEVICES))
        waiting = any(counters[name] for name in ("quarantined_handles", *WAITING))
        if not waiting and physical != counters["resident_bytes"]:
            problems.append(f"{physical} bytes of physical memory, and resident_bytes is {counters['resident_bytes']}")
        for tag in {block.tag for block in self.blocks.values()}:
            paused = sum(row[5] != ACTIVE for row in rows if row[7] == tag)
            if core.tag_info(tag)[0] != paused:
                problems.append(f"tag_info says {core.tag_info(tag)[0]} of '{tag}' are paused, really {paused}")
        return problems

    @staticmethod
    def check_error(step: Step, error: BaseException, faults: Iterable[Fault]) -> list[str]:
        """The exception must name the call and the code."""
        driver_call, result = getattr(error, "driver_call", ""), getattr(error, "driver_result", 0)
        os_error = getattr(error, "os_error", 0)
        if (driver_call, result) in step.causes:
            return []
        faults = tuple(faults)
        # Where everything fails from a call on, another device's thread may meet a failure before that call is made.
        codes = {fault.code for fault in faults if fault.call.domain == DRIVER} if len(faults) > 2 else set()
        if result in codes and driver_call in str(error):
            return []
        for fault in faults:
            if isinstance(error, DeviceLockedError) and (fault.call.name, fault.code) == ("flock", errno.EWOULDBLOCK):
                return []  # which is how the system says that another process holds it
            if isinstance(error, TorchMemorySaverError):
                code = result if fault.call.domain == DRIVER else os_error
                # A call may be counted under several names, by what it is called with.
                name = fault.call.name.removesuffix("_of_system")
                if driver_call == name and code == fault.code and name in str(error):
                    return []
            elif isinstance(error, MemoryError) and fault.call.name in ("malloc", "calloc", "realloc", "strdup"):
                return []  # Python's own, out of the glue
        named = f"driver_call={driver_call!r}, driver_result={result}, os_error={os_error}"
        return [f"the exception does not name the call and the code: {type(error).__name__}({named}): {error}"]

    @staticmethod
    def check_tolerated(step: Step, fault: Fault, log: str, locked: bool) -> list[str]:
        """Whether a call may succeed in spite of this: some do silently, others say so in the log. `locked`: all host memory
        is page-locked; that a piece could not be is said once a process."""
        if (
            not locked
            or fault.call.name in TOLERATED
            or fault.call.name in step.tolerates
            or (fault.call.domain == DRIVER and fault.code in step.waits_for)
        ):
            return []
        if fault.call.domain != DRIVER and fault.code in (errno.EINTR, errno.EOPNOTSUPP):
            return []
        return [] if fault.call.name in log else [UNTOLD]

    # ---- running ----

    def attempt(self, call: Callable[[], None], step: Step, faults: Sequence[Fault]) -> Outcome:
        """One call with `faults` in force, and everything that must be true after it, when they are not any more."""
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
            self.machine.drain()  # a copy must see that it was let go before the next hold
        fired = self.machine.fired() - count
        log = read_log()
        # With one failure of several it was the first one's, or, on another thread, another one's.
        blamed = faults if fired else ()
        problems = step.verify(before, error, {fault.call.name for fault in blamed})
        problems += self.check_contents() + self.check_books()
        if error is not None and not step.keeps:
            problems += self.check_kept(held, {fault.call.name for fault in blamed})
        if error is None:
            # Where everything fails from a call on, that call is the one that was certainly reached.
            told = [fault for fault in blamed if fault is faults[0] or fault.times == 1]
            # What waits because of the first is given back, and the allocation tried again.
            if faults and faults[0].call.name in TOLERATED:
                told = [fault for fault in told if (fault.call.name, fault.code) != ("cuMemCreate", OUT_OF_MEMORY)]
            locked = self.machine.host_bytes() >= core.counters()["host_resident_bytes"]
            # What was not unregistered hides what was not registered.
            locked &= all(fault.call.name != "cuMemHostUnregister" for fault in blamed)
            untold = [self.check_tolerated(step, fault, log, locked) for fault in told]
            # Which of several was reached first depends on the threads where everything fails from a call on.
            reached = len(faults) > 2 and any(fault.call.name in log for fault in faults)
            # One message, as an exception is one.
            reached |= step.logs_its_end and any(fault.call.name in log for fault in told)
            if (fired >= len(faults) or all(untold)) and not reached:
                problems += [problem for found in untold for problem in found]
        elif blamed or step.causes:
            problems += self.check_error(step, error, blamed)
        else:
            problems.append(f"failed without a cause: {type(error).__name__}: {error}")
        return Outcome(error, problems, fired, calls)

    def check_kept(self, before: dict[str, Any], failed: set[str]) -> list[str]:
        """A call that failed has kept nothing of what it made, except what it could not give back."""
        after = self.holdings()
        if any(
            held[name] for held in (before, after) for name in after if name in WAITING or name.startswith("quarantined")
        ):
            return []
        return [
            f"the failed call kept {name}: {before[name]}, now {after[name]}"
            for name in after
            if grew(before[name], after[name])
            # Without a thread to give it back, host memory waits for the next call.
            and not ((self.pools or "pthread_create" in failed) and is_of_host_memory(name))
            and not (name == "mapped bytes" and "munmap" in failed)  # addresses that were never touched
        ]

    def complete(self) -> list[str]:
        """With no cause of failure left: everything can be resumed, is right, and can be freed."""
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
        for block in list(self.blocks.values()):
            self.free(block)
        self.reclaim()
        self.machine.settle()
        if self.pools:
            core.release_host_memory()
            self.machine.settle()
        if self.backup_directory != self.directory / "backups":
            self.set_directory(self.directory / "backups")
        return problems

    def holdings(self) -> dict[str, Any]:
        """Everything that could have leaked."""
        held: dict[str, Any] = self.machine.holdings(DEVICES)
        # Totals of what was done are not held.
        held |= {name: value for name, value in core.counters().items() if not name.endswith("_total")}
        held["files"] = sorted(os.path.relpath(path, self.directory) for path in self.directory.rglob("*") if path.is_file())
        return held
