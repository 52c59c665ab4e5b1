"""The world of one injection: the allocations of a scenario, the calls under test, and what scenarios prepare."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from blocks import (
    ACTIVE,
    DAMAGED,
    DEVICE_MEMORY,
    DEVICES,
    GRANULARITY,
    MMAP,
    NONE,
    PAUSED,
    PINNED,
    SHARED,
    Block,
    pattern,
)
from core_regions import core_region
from machine import Machine
from scenario import SMALL

from torch_memory_saver import _core as core
from torch_memory_saver.errors import TorchMemorySaverError

_numbers = itertools.count()
#: After the frees of an earlier injection the first resume makes no run.
CYCLES_TO_RUNS = 2
#: Descriptors of exported memory have numbers from here on: csrc/base/descriptors.h.
LOWEST_SHARED = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 4096)
#: Ends of the names of counters that may rise in a call: they are no memory that it holds.
_NOT_HELD = ("_total", "_peak_bytes")


@dataclass
class World:
    machine: Machine
    directory: Path
    blocks: dict[int, Block] = field(default_factory=dict)
    seed: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    backup_directory: Path = field(init=False)
    holds_copies: bool = False
    #: Calls are counted and may fail. The checks use the library only while this is False.
    armed: bool = False
    #: Guard mode is on.
    guards: bool = False
    #: Host memory may be kept for later.
    pools: bool = False
    retains: bool = False
    #: A tag has been made, which stays for ever.
    new_tags: bool = False
    #: Tags of scenarios with runs that have other names by now.
    renamed: ClassVar[dict[str, str]] = {}
    #: The most slack that there may be: what was freed of runs.
    freed_in_runs: int = 0

    def __post_init__(self) -> None:
        self.backup_directory = self.directory / "backups"

    # ---- allocations ----

    def allocate(self, size: int, kind: int, tag: str = "a", device: int = 0) -> Block:
        with core_region(self.name_of(tag), kind, True):
            address = core.allocate(size, device)
        return self.adopt(address, size, kind, self.name_of(tag), device)

    def name_of(self, tag: str) -> str:
        return self.renamed.get(tag, tag)

    def adopt(self, address: int, size: int, kind: int, tag: str, device: int) -> Block:
        """Takes an allocation into the books, and gives it contents."""
        self.pools |= kind == SHARED  # the buffers of the ring, and of fingerprints
        self.seed += 1
        block = Block(address, size, tag, kind, device, pattern(self.seed, size))
        ctypes.memmove(address, block.data, size)
        self.blocks[address] = block
        return block

    def free(self, block: Block) -> None:
        del self.blocks[block.address]
        self.freed_in_runs += GRANULARITY * block.in_run
        assert core.free(block.address) is True, "free did not know the allocation"

    def states(self) -> dict[int, int]:
        return {row.address: row.state for row in core.segments()}

    def state(self, block: Block) -> int:
        row = core.find(block.address)
        return row.state if row else -1

    # ---- the calls ----

    def _tags(self, tags: Iterable[str] | None) -> tuple[str, ...] | None:
        return None if tags is None else tuple(map(self.name_of, tags))

    def _chosen(self, tags: Iterable[str] | None) -> list[Block]:
        names = self._tags(tags)
        return [block for block in self.blocks.values() if names is None or block.tag in names]

    def pause(
        self,
        tags: Iterable[str] | None = None,
        interruptible: bool = False,
        backup: int | None = None,
        live: bool = False,
        preserves: bool = False,
    ) -> None:
        """`live`: the core gets the live bytes of each block (`Block.live`; None: all of them). `preserves`: also those of
        blocks without a backup, which keep them."""
        for block in self._chosen(tags):
            if not block.paused:
                keeps_backend = backup == PINNED and block.kind == MMAP
                own = PINNED if preserves and block.kind == NONE and block.live is not None else block.kind
                block.chosen = (own if backup is None or keeps_backend else backup, live)
        try:
            core.pause(self._tags(tags), None, interruptible, backup, self.find_live if live else None, preserves=preserves)
            if backup == NONE:
                for block in self._chosen(tags):
                    block.known &= not block.paused
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
        self.note_filler(tags, zero)
        try:
            core.resume(self._tags(tags), None, interruptible, timeout, exclusive, host_policy, zero)
        finally:
            self.note()

    def note_filler(self, tags: Iterable[str] | None, zero: bool) -> None:
        for block in self._chosen(tags):
            block.filler = 0 if zero else core.GUARD_BYTE if self.guards else None

    def note(self) -> None:
        """Records the effect of the last call; while one is under test, only when that is over."""
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

    def neighbours(self, count: int, kind: int, tag: str = "a", device: int = 0) -> list[Block]:
        """Side by side, each with a handle of its own and of the least size. The second range of a tag is as large as the
        first one, which is freed."""
        first = self.allocate(count * GRANULARITY, kind, tag, device)
        blocks = [self.allocate(SMALL, kind, tag, device) for _ in range(count)]
        self.free(first)
        return blocks

    def run(self, count: int, kind: int, tag: str = "a", device: int = 0) -> list[Block]:
        """Neighbours that have come back together, on one handle."""
        blocks = self.neighbours(count, kind, tag, device)
        cycles = 0
        while cycles == 0 or self.machine.mapped_with(blocks[-1].address) != (blocks[0].address, count * GRANULARITY):
            if cycles == CYCLES_TO_RUNS:
                # The tag gets no runs any more: memory of it was exported.
                for block in blocks:
                    self.free(block)
                World.renamed[tag], self.new_tags, cycles = f"{tag} {next(_numbers)}", True, 0
                blocks = self.neighbours(count, kind, tag, device)
            self.pause((tag,))
            self.resume((tag,))
            cycles += 1
        for block in blocks:
            block.in_run = True
            self.seed += 1
            block.write(pattern(self.seed, block.size))
        return blocks

    def cycle(self) -> None:
        self.pause(None)
        self.resume(None)

    def rewrite(self, *blocks: Block) -> None:
        """Other contents than those that an earlier pause saved; without arguments, of all blocks."""
        for block in blocks or self.blocks.values():
            self.seed += 1
            block.write(pattern(self.seed, block.size))

    def change(self, block: Block) -> None:
        """One byte in the middle."""
        middle = block.size // 2
        block.write(block.data[:middle] + bytes([block.data[middle] ^ 1]) + block.data[middle + 1 :])

    def retain(self, on: bool) -> None:
        """Backups are kept with their contents, and the buffer of their fingerprints in the pool."""
        self.retains = self.retains or on
        core.set_retain_backup(on)

    def guard(self, on: bool) -> None:
        core.set_guard(on)
        self.guards = on

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
            core.region_leave(core.region_enter(f"tag {number}", NONE, True))

    def export(self, block: Block) -> None:
        """Exports its memory, and checks that the descriptor is one of it."""
        exported = core.export_memory(block.address)
        assert os.readlink(f"/proc/self/fd/{exported.descriptor}").startswith("/memfd:simulated memory"), exported

    def refresh_peers(self) -> None:
        core.refresh_peers()

    def capture_begin(self, tag: str | None = None) -> None:
        core.capture_begin(self.name_of(tag) if tag else None, NONE)

    def capture_end(self) -> None:
        core.capture_end()

    def view(self, block: Block) -> Any:
        return core.host_backup(block.address, block.size)

    def use_device(self, device: int) -> None:
        context = self.machine.retain(device)
        if device == 0:
            self.machine.push(context)

    def fill_device(self, device: int, but: int = 0) -> None:
        """`but`: so many allocations of the least size fit."""
        size = DEVICE_MEMORY - self.machine.physical_bytes(device) - but * GRANULARITY
        self.machine.take_memory(device, size)
        self.taken[device] = self.taken.get(device, 0) + size

    def empty_device(self, device: int) -> None:
        self.machine.take_memory(device, -self.taken.pop(device, 0))

    def hold(self, block: Block) -> Callable[[], None]:
        """Keeps the device busy until what is returned is called."""
        gate = self.machine.hold_device(block.address)
        return lambda: self.machine.open_gate(gate)

    def hold_copies(self) -> Callable[[], None]:
        self.holds_copies = True
        self.machine.set_bandwidth(1)
        return lambda: self.machine.set_bandwidth(0)

    def damage(self, block: Block) -> None:
        """Makes the driver fail to unmap this one."""
        self.machine.refuse_once("cuMemUnmap")
        with contextlib.suppress(TorchMemorySaverError):
            self.pause((block.tag,))
        assert self.state(block) == DAMAGED, "the scenario could not damage an allocation"

    def free_refused(self, block: Block) -> None:
        """A free whose memory the driver does not release at once."""
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

    @staticmethod
    def shared_files() -> list[str]:
        """The objects of the shared store, whole or not, and the links to them."""
        folder = Path(os.environ["TMS_SHARED_DIR"])
        files = (path.relative_to(folder) for part in ("objects", "holders") for path in (folder / part).rglob("*"))
        return sorted(
            map(str, (path for path in files if path.name != "lock" and len(path.parts) + (path.parts[0] == "objects") > 2))
        )

    @staticmethod
    def remove_objects() -> None:
        folder = Path(os.environ["TMS_SHARED_DIR"])
        for path in (*folder.glob("objects/*"), *folder.glob("holders/*/*")):
            if path.name != "lock":
                path.unlink()

    @staticmethod
    def publish_objects() -> None:
        """Links all objects, so that they stay without this process."""
        folder = Path(os.environ["TMS_SHARED_DIR"])
        names = folder / "names" / "model"
        names.mkdir(parents=True, exist_ok=True)
        (names / "manifest.json").touch()  # without one, a clean-up would remove the name
        for path in (folder / "objects").iterdir():
            if not (names / path.name).exists():
                os.link(path, names / path.name)

    @staticmethod
    def withdraw_objects() -> None:
        """Removes these links, and the objects."""
        folder = Path(os.environ["TMS_SHARED_DIR"])
        for path in (folder / "names" / "model").iterdir():
            path.unlink()
            (folder / "objects" / path.name).unlink(missing_ok=True)

    @staticmethod
    def published(name: str) -> list[str] | None:
        """The objects of a published name. None: there is no such name."""
        manifest = Path(os.environ["TMS_SHARED_DIR"], "names", name, "manifest.json")
        return list(json.loads(manifest.read_text())["objects"]) if manifest.exists() else None

    def withdraw(self, name: str) -> None:
        """Removes a published name, and the links of this process."""
        shutil.rmtree(Path(os.environ["TMS_SHARED_DIR"], "names", name), ignore_errors=True)
        self.end_links()

    def end_links(self) -> None:
        """Ends the links that publish and adopt have kept, as a pause does."""
        block = self.allocate(SMALL, SHARED, "a")
        self.pause(("a",))
        self.resume(("a",))
        self.free(block)

    def holdings(self) -> dict[str, Any]:
        """Everything that could have leaked."""
        held: dict[str, Any] = self.machine.holdings(DEVICES)
        # Totals of what was done are not held.
        held |= {name: value for name, value in core.counters().items() if not name.endswith(_NOT_HELD)}
        held["descriptors"] = sum(int(number) >= LOWEST_SHARED for number in os.listdir("/proc/self/fd"))
        held["shared files"] = self.shared_files()
        held["files"] = sorted(os.path.relpath(path, self.directory) for path in self.directory.rglob("*") if path.is_file())
        return held
