"""What every case gets: the library, the devices, an allocator, sizes and repetitions."""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .driver import Device
from .figures import Row, Samples, Target
from .memory import Allocator, Block
from .savers import Saver

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "SMALLEST_SCALE",
    "Case",
    "ResidentSampler",
    "Setting",
    "Shape",
    "WrongContents",
    "resident_bytes",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
#: A smaller scale would make the shapes of a case equal.
SMALLEST_SCALE = 1 / 512
#: The smallest block that is benchmarked. PyTorch makes one segment for each block of this size or larger.
_SMALLEST = 12 * MIB
#: Segments are multiples of this.
_GRANULARITY = 2 * MIB
#: The largest first: the size of a shape is a multiple of the last.
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SAMPLING_S = 0.001
#: Seconds of rest for each GiB released. An H200 clears a GiB in a fraction of that; until then copies are slower.
_REST_S = 0.02
#: Seconds of a rest whose length is the same for all who compete.
_LONG_REST_S = 0.3


class WrongContents(Exception):
    """Memory does not hold what was written to it."""


@dataclass(frozen=True)
class Shape:
    """`count` blocks of `size` bytes. A `size` of 0: `count` repetitions of work that needs no memory."""

    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size

    def __str__(self) -> str:
        if not self.size:
            return "once"
        unit, name = next(each for each in _UNITS if self.size % each[0] == 0)
        return f"{self.count} x {self.size // unit} {name}"

    def scaled(self, scale: float) -> Shape:
        """The shape with fewer blocks, which are also smaller where fewer than two would be left."""
        if not self.size:
            return self  # Repetitions of work are not scaled.
        fewest = min(self.count, 2)
        if self.count * scale >= fewest or self.size < _SMALLEST:
            return Shape(max(round(self.count * scale), fewest), self.size)
        size = int(self.bytes * scale / fewest) // _GRANULARITY * _GRANULARITY
        return Shape(fewest, min(max(size, _SMALLEST), self.size))


@dataclass
class Setting:
    """What a case gets in one process.

    Attributes:
        devices: At least one device.
        scale: The factor that sizes are multiplied by.
        repetitions: How often each measurement is repeated.
        directory: The folder for disk backups and for the file that they are compared with.
        is_peer: Whether `saver` is the C++ package. Then no limit is measured, and nothing is freed, because not every
            release of that package survives it.
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
        """The seconds that `work` takes. All devices are idle before it, and the time ends when they are idle again."""
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def rest(self, size: int) -> None:
        """Waits after a pause of `size` bytes, so that the driver can clear them. In use other work fills that time."""
        time.sleep(_REST_S * size / GIB)

    def rest_long(self) -> None:
        """Waits 0.3 s, less where sizes are scaled down. The driver clears released memory in the background, 2 ms a GiB on
        an H100, and the call that gives access to new memory waits for that."""
        time.sleep(_LONG_REST_S * self.scale)

    def _synchronize(self) -> None:
        for device in reversed(self.devices):  # the first device comes last, so that it stays the current one
            device.synchronize()

    def allocate(
        self, tag: str, shape: Shape, backup: str = "none", host_memory: str = "release", device: Device | None = None
    ) -> list[Block]:
        """Allocates blocks in a region of their own and fills each with its value."""
        blocks = self.make(tag, [shape.size] * shape.count, backup, host_memory, device)
        self.fill(blocks)
        return blocks

    def make(
        self,
        tag: str,
        sizes: Sequence[int],
        backup: str = "none",
        host_memory: str = "release",
        device: Device | None = None,
    ) -> list[Block]:
        """Allocates blocks of these sizes in a region of their own, one after the other. They are not filled yet."""
        device = device or self.device
        with self.allocator.on(device), self.saver.region(tag, backup, host_memory):
            return [self.allocator.allocate(device, size, index % 251 + 1) for index, size in enumerate(sizes)]

    def fill(self, blocks: Sequence[Block]) -> None:
        """Fills each block with its value."""
        for block in blocks:
            block.fill()
        self._synchronize()  # Not every library waits for the device before it unmaps.

    def check(self, blocks: Sequence[Block], when: str) -> None:
        """Raises WrongContents if a block does not hold its value. `when` begins the message."""
        for index, block in enumerate(blocks):
            if not block.is_intact():
                raise WrongContents(f"{when}: block {index} of {len(blocks)} does not hold what was written to it")
        self.device.make_current()

    @contextmanager
    def bar(self, title: str) -> Iterator[Any]:
        """The argument `progress` for a pause or a resume that is not timed, or takes seconds; None if there is no bar."""
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
        """The row of these measurements, as ours or as the peer's."""
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
    """One case of the benchmarks.

    Attributes:
        name: The name for `--cases`.
        title: One line for the table.
        shapes: The shapes to measure. Each runs in a process of its own.
        repetitions, peer_repetitions: Measurements in one process, by default. 0 for the peer: it cannot run the case.
        processes, peer_processes: How many fresh processes measure, one after the other.
        devices: How many devices the case needs.
        host_bytes: The most host memory that the case uses. Before all cases a process uses as much. 0: it is not needed.
        peer_gains: How many times as fast as the C++ package operations have to be. Others are only shown beside it.
    """

    name = ""
    title = ""
    shapes: tuple[Shape, ...] = ()
    repetitions = 7
    peer_repetitions = 2
    processes = peer_processes = 1
    devices = 1
    host_bytes = 0
    peer_gains: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        """Measures one shape, which is scaled already. Returns the rows.

        Raises:
            Unavailable: The library or the machine lacks what the case needs.
        """


def resident_bytes() -> int:
    """The resident anonymous memory of this process in bytes. Backups are part of it; the simulated GPU's memory is not."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no line RssAnon")


class ResidentSampler:
    """Samples resident_bytes every millisecond on a thread. `peak` is the largest value while the context lasted."""

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
