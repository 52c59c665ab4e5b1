"""What every case is given: the library, the devices, memory to allocate from, and how large and how often."""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .driver import Device
from .figures import Row, Samples, Target
from .memory import Allocator, Block
from .savers import Saver

__all__ = ["GIB", "MIB", "SMALLEST_SCALE", "Case", "ResidentSampler", "Setting", "Shape", "WrongContents", "resident_bytes"]

MIB = 1 << 20
GIB = 1 << 30
#: Smaller ones would make the shapes of a case equal.
SMALLEST_SCALE = 1 / 512
#: Of which torch makes a segment each, as it does of every larger size: no smaller one is benchmarked.
_SMALLEST = 12 * MIB
#: Segments are multiples of this.
_GRANULARITY = 2 * MIB
_SAMPLING_S = 0.001
#: Seconds for each GiB that was released: several times what an H200 takes to clear it, during which copies are slower.
_REST_S = 0.02


class WrongContents(Exception):
    """Memory does not hold what was put into it."""


@dataclass(frozen=True)
class Shape:
    """`count` blocks of `size` bytes. Of 0 bytes: as many repetitions of work."""

    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size

    def __str__(self) -> str:
        if not self.size:
            return "once"
        unit, name = (GIB, "GiB") if self.size % GIB == 0 else (MIB, "MiB")
        return f"{self.count} x {self.size // unit} {name}"

    def scaled(self, scale: float) -> Shape:
        """Fewer blocks, and smaller ones where that would leave fewer than two."""
        if not self.size:
            return self  # No memory: it is work that is repeated.
        fewest = min(self.count, 2)
        if self.count * scale >= fewest:
            return Shape(round(self.count * scale), self.size)
        size = int(self.bytes * scale / fewest) // _GRANULARITY * _GRANULARITY
        return Shape(fewest, min(max(size, _SMALLEST), self.size))


@dataclass
class Setting:
    """Of one process.

    Attributes:
        devices: At least one.
        scale: What sizes are multiplied with.
        repetitions: Of each measurement.
        directory: For disk backups and the file they are held against.
        is_peer: Whether `saver` is the C++ package: then no limit is measured, and nothing is freed, which not all of its
            releases survive.
    """

    saver: Saver
    allocator: Allocator
    devices: Sequence[Device]
    scale: float
    repetitions: int
    directory: str
    is_peer: bool

    @property
    def device(self) -> Device:
        return self.devices[0]

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds from when all devices have nothing to do to when they have nothing to do again."""
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def rest(self, size: int) -> None:
        """Between a pause of `size` bytes and a resume, while in use others work: the driver clears what was released."""
        time.sleep(_REST_S * size / GIB)

    def _synchronize(self) -> None:
        for device in reversed(self.devices):  # so that the first is the current one in the end
            device.synchronize()

    def allocate(
        self, tag: str, shape: Shape, backup: str = "none", host_memory: str = "release", device: Device | None = None
    ) -> list[Block]:
        """Blocks in a region of their own, each full of its value."""
        device = device or self.device
        with self.allocator.on(device), self.saver.region(tag, backup, host_memory):
            blocks = [self.allocator.allocate(device, shape.size, index % 251 + 1) for index in range(shape.count)]
        for block in blocks:
            block.fill()
        self._synchronize()  # Not every library waits for the device before it unmaps.
        return blocks

    def check(self, blocks: Sequence[Block], when: str) -> None:
        """Raises WrongContents."""
        for index, block in enumerate(blocks):
            if not block.is_intact():
                raise WrongContents(f"{when}: block {index} of {len(blocks)} does not hold what was put into it")
        self.device.make_current()

    @contextmanager
    def bar(self, title: str) -> Iterator[Any]:
        """What to hand to a pause or resume whose time is not measured, or is seconds, as `progress`."""
        manager = self.saver.progress(title)
        if manager is None:
            yield None
            return
        with manager as bar:
            yield bar

    def row(
        self,
        case: Case,
        shape: object,
        operation: str,
        size: int,
        values: Sequence[float],
        limit: Sequence[float] | None = None,
        limit_name: str = "",
        target: Target | None = None,
        notes: str = "",
    ) -> Row:
        """What was measured, as ours or as the peer's."""
        measured = Samples.of(values)
        if self.is_peer:
            return Row(case.name, str(shape), operation, size, None, peer=measured)
        return Row(
            case.name,
            str(shape),
            operation,
            size,
            measured,
            None if limit is None else Samples.of(limit),
            limit_name,
            target or Target(),
            notes=notes,
        )


class Case(ABC):
    """One case of the suite.

    Attributes:
        name: For `--cases`.
        title: One line, for the table.
        shapes: As the issue of it says; each runs in a process of its own.
        repetitions, peer_repetitions: Measurements in one process, by default. 0 of the peer: it cannot do it.
        processes, peer_processes: How many fresh processes measure, one after the other.
        devices: How many it needs.
        host_bytes: The most host memory that it uses, for a process that uses as much before it; 0: it does not matter.
    """

    name = ""
    title = ""
    shapes: tuple[Shape, ...] = ()
    repetitions = 7
    peer_repetitions = 2
    processes = peer_processes = 1
    devices = 1
    host_bytes = 0

    @abstractmethod
    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        """Measures. `shape` is scaled already.

        Raises:
            Unavailable: The library, or the machine, does not have what it needs.
        """


def resident_bytes() -> int:
    """Anonymous memory of this process: what backups are made of. The simulated GPU's memory, which is files, is not."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status does not tell RssAnon")


class ResidentSampler:
    """The largest resident_bytes while the context lasts, looked at every millisecond by a thread."""

    def __enter__(self) -> ResidentSampler:
        gc.collect()
        self.peak = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes())

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLING_S):
            self.peak = max(self.peak, resident_bytes())
