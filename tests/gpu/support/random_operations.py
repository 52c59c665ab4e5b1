"""Random operations on managed memory. Every tensor's bytes are kept on the host as well and compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_support import MIB, core, empty, release_everything, saver, state_of, tms, torch

TAGS = ("weights", "kv_cache", "adapter")
BACKUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "pinned": {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"},
    "mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "disk": {"enable_disk_backup": True},
}
#: Bytes of one tensor: below, on and above torch's small blocks and the driver's granularity.
SIZES = (1, 511, 4096, 128 << 10, MIB, MIB + 1, 2 * MIB, 3 * MIB + 513)
#: Of all tensors together, bytes.
MAX_BYTES = 48 * MIB
MAX_TENSORS = 40
#: Operations between two comparisons of everything.
CHECK_EVERY = 100


@dataclass
class Entry:
    """One tensor, and what is known of it."""

    tensor: torch.Tensor
    tag: str  # "": ordinary memory
    backup: str
    paused: bool = False
    contents: torch.Tensor | None = None  # on the host; None: unknown


class Operations:
    """Does random operations. `done` counts them by name."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._entries: list[Entry] = []
        self._bytes = torch.randint(
            256, (16 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(self._random.randrange(1 << 62))
        )
        self.compared_bytes = 0
        self.done: dict[str, int] = {}
        self._choices: list[tuple[Callable[[], bool], int]] = [
            (self.allocate, 20),
            (self.write, 25),
            (self.fill, 10),
            (self.copy, 10),
            (self.compare, 20),
            (self.free, 16),
            (self.pause, 6),
            (self.resume, 9),
            (self.read_backup, 6),
            (self.empty_cache, 2),
            (self.retain, 1),
        ]

    def run(self, count: int) -> None:
        """This many operations, and as many more as it takes until each has occurred, up to ten times as many."""
        calls = [call for call, _ in self._choices]
        weights = [weight for _, weight in self._choices]
        while (number := sum(self.done.values())) < count or (len(self.done) < len(calls) and number < 10 * count):
            (call,) = self._random.choices(calls, weights)
            if not call():
                continue  # there was nothing to do it with
            self.done[call.__name__] = self.done.get(call.__name__, 0) + 1
            if number % CHECK_EVERY == 0:
                self.compare_all()
        saver.resume()
        self._resumed(None)
        self.compare_all()

    def compare_all(self) -> None:
        for entry in self._entries:
            self._compare(entry)
        managed = {entry.tag for entry in self._entries if entry.tag}
        for tag in managed:
            states = {state_of(entry.tensor) for entry in self._entries if entry.tag == tag and entry.paused}
            assert states <= {core.STATE_PAUSED}, (tag, states)

    def close(self) -> None:
        self._entries.clear()
        saver.retain_cpu_backup = False
        release_everything()

    # What an operation is made of.

    def _pick(self, *, paused: bool | None = None) -> Entry | None:
        found = [entry for entry in self._entries if paused is None or entry.paused == paused]
        return self._random.choice(found) if found else None

    def _some_bytes(self, size: int) -> torch.Tensor:
        start = self._random.randrange(self._bytes.numel() - size)
        return self._bytes[start : start + size].clone()

    def _tags(self) -> list[str] | str | None:
        return self._random.choice([None, self._random.choice(TAGS), self._random.sample(TAGS, 2)])

    def _compare(self, entry: Entry) -> None:
        if not entry.tag:
            assert core.find(entry.tensor.data_ptr()) is None
        else:
            assert state_of(entry.tensor) == (core.STATE_PAUSED if entry.paused else core.STATE_ACTIVE)
        if entry.paused or entry.contents is None:
            return
        assert torch.equal(entry.tensor.cpu(), entry.contents), f"{entry.tag or 'ordinary'}, {entry.backup}: other bytes"
        self.compared_bytes += entry.contents.numel()

    def _resumed(self, tags: list[str] | str | None) -> None:
        for entry in self._entries:
            if entry.tag and (tags is None or entry.tag == tags or entry.tag in tags):
                entry.paused = False

    # The operations: False where there was nothing to choose from.

    def allocate(self) -> bool:
        size = self._random.choice(SIZES)
        used = sum(entry.tensor.numel() for entry in self._entries)
        if len(self._entries) >= MAX_TENSORS or used + size > MAX_BYTES:
            return False
        tag, backup = self._random.choice(TAGS), self._random.choice(list(BACKUPS))
        with saver.region(tag=tag, **BACKUPS[backup]):
            if self._random.random() < 0.15:
                with saver.disable():
                    entry = Entry(empty(size), "", "none")
            else:
                entry = Entry(empty(size), tag, backup)
        self._compare(entry)
        if self._random.random() < 0.8:
            entry.contents = self._some_bytes(size)
            entry.tensor.copy_(entry.contents)
        self._entries.append(entry)
        return True

    def write(self) -> bool:
        """All bytes, or those of a part, from the host."""
        entry = self._pick(paused=False)
        if entry is None:
            return False
        size = entry.tensor.numel()
        if entry.contents is None or self._random.random() < 0.5:
            entry.contents = self._some_bytes(size)
            entry.tensor.copy_(entry.contents)
            return True
        start = self._random.randrange(size)
        end = self._random.randint(start + 1, size)
        entry.contents[start:end] = self._some_bytes(end - start)
        entry.tensor[start:end].copy_(entry.contents[start:end])
        return True

    def fill(self) -> bool:
        """By a kernel, which may still run when the next operation comes."""
        entry = self._pick(paused=False)
        if entry is None:
            return False
        value = self._random.randrange(256)
        entry.tensor.fill_(value)
        entry.contents = torch.full((entry.tensor.numel(),), value, dtype=torch.uint8)
        return True

    def copy(self) -> bool:
        """From one tensor to another on the device."""
        source, target = self._pick(paused=False), self._pick(paused=False)
        if source is None or target is None or source is target or source.contents is None:
            return False
        size = min(source.tensor.numel(), target.tensor.numel())
        if target.contents is None and size < target.tensor.numel():
            return False
        target.tensor[:size].copy_(source.tensor[:size])
        if target.contents is None:
            target.contents = source.contents[:size].clone()
        else:
            target.contents[:size] = source.contents[:size]
        return True

    def compare(self) -> bool:
        entry = self._pick()
        if entry is None:
            return False
        self._compare(entry)
        return True

    def free(self) -> bool:
        if not self._entries:
            return False
        self._entries.pop(self._random.randrange(len(self._entries)))
        return True

    def pause(self) -> bool:
        tags = self._tags()
        saver.pause(tags)
        for entry in self._entries:
            if not entry.tag or not (tags is None or entry.tag == tags or entry.tag in tags) or entry.paused:
                continue
            entry.paused = True
            if entry.backup == "none":
                entry.contents = None
        return True

    def resume(self) -> bool:
        tags = self._tags()
        saver.resume(tags)
        self._resumed(tags)
        return True

    def read_backup(self) -> bool:
        entry = self._pick(paused=True)
        if entry is None or entry.backup == "disk":
            return False
        kept = saver.get_cpu_backup(entry.tensor, zero_copy=self._random.random() < 0.5)
        if entry.backup == "none":
            assert kept is None
            return True
        assert kept is not None
        if entry.contents is not None:
            assert torch.equal(kept, entry.contents), f"{entry.tag}, {entry.backup}: the backup has other bytes"
            self.compared_bytes += entry.contents.numel()
        return True

    def empty_cache(self) -> bool:
        self._random.choice([tms.empty_cache, torch.cuda.empty_cache])()
        return True

    def retain(self) -> bool:
        saver.retain_cpu_backup = self._random.random() < 0.5
        return True
