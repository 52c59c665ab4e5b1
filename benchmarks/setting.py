"""What every case gets: the library, the device, memory, sizes and repetitions."""

from __future__ import annotations

import importlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from limits import BareAllocations, Device, NoCompiler
from results import Row
from savers import Saver

__all__ = [
    "GIB",
    "LARGE_HANDLE",
    "MIB",
    "SMALLEST_SCALE",
    "Block",
    "Case",
    "Setting",
    "Shape",
    "WrongContents",
    "live_and_dead_sizes",
]

MIB = 1 << 20
GIB = 1 << 30
#: Bytes. The driver's calls take little time for handles of this size; docs/performance.md has their times by size.
LARGE_HANDLE = 512 * MIB
#: A smaller scale would make the shapes of a case equal.
SMALLEST_SCALE = 1 / 512
#: The smallest block that is benchmarked. PyTorch makes one segment for each block of this size or larger.
_SMALLEST = 12 * MIB
#: Segments are multiples of this.
_GRANULARITY = 2 * MIB
#: Seconds of rest for each GiB released. An H200 clears a GiB in a fraction of that; until then copies are slower.
_REST_S = 0.02
#: How many bytes at each end of a block are compared.
_CHECKED_BYTES = 64 << 10


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
        unit, name = (GIB, "GiB") if self.size % GIB == 0 else (MIB, "MiB")
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
class Block:
    """Device memory in which every byte has the same value.

    Attributes:
        owner: The tensor that keeps the memory.
    """

    device: Device
    address: int
    size: int
    value: int
    owner: Any

    def fill(self) -> None:
        self.device.fill(self.address, self.size, self.value)

    def is_intact(self) -> bool:
        """Whether both ends of the block hold the value."""
        length = min(_CHECKED_BYTES, self.size)
        return all(
            self.device.read(start, length) == bytes([self.value]) * length
            for start in (self.address, self.address + self.size - length)
        )


@dataclass
class Setting:
    """The library, the device and the options of a case in one process.

    Attributes:
        repetitions: How often each measurement is repeated.
        directory: The folder for disk backups and for the file that they are compared with.
        is_peer: Whether `saver` is the C++ package. Then no limit is measured, and nothing is freed, because not every
            release of that package survives it.
    """

    saver: Saver
    device: Device
    repetitions: int
    directory: str
    is_peer: bool

    def timed(self, work: Callable[[], object]) -> float:
        """The seconds that `work` takes. The device is idle before it, and the time ends when it is idle again."""
        self.device.synchronize()
        start = time.perf_counter()
        work()
        self.device.synchronize()
        return time.perf_counter() - start

    def rest(self, size: int) -> None:
        """Waits after a pause of `size` bytes, so that the driver can clear them. In use other work fills that time."""
        time.sleep(_REST_S * size / GIB)

    def allocate(self, tag: str, shape: Shape, backup: str = "none", host_memory: str = "release") -> list[Block]:
        """Allocates blocks in a region of their own and fills each with its value."""
        with self.saver.region(tag, backup, host_memory):
            blocks = [self.block(shape.size, index) for index in range(shape.count)]
        self.fill(blocks)
        return blocks

    def block(self, size: int, index: int) -> Block:
        """A block of `size` bytes in the current region. `index` chooses its value. It is not filled yet."""
        torch = importlib.import_module("torch")
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        return Block(self.device, tensor.data_ptr(), size, index % 251 + 1, tensor)

    def bare(self, total: int, size: int) -> tuple[BareAllocations | None, str]:
        """The bare driver calls on handles of `size` bytes and their name. None for the peer, and without a C compiler; then
        the text says why."""
        if self.is_peer:
            return None, ""
        try:
            return BareAllocations(total, size, self.device.ordinal), f"bare driver calls on handles of {size // MIB} MiB"
        except NoCompiler as error:
            return None, f"no limit: {error}"

    def fill(self, blocks: Sequence[Block]) -> None:
        """Fills each block with its value."""
        for block in blocks:
            block.fill()
        self.device.synchronize()  # Not every library waits for the device before it unmaps.

    def check(self, blocks: Sequence[Block], when: str) -> None:
        """Raises WrongContents if a block does not hold its value. `when` begins the message."""
        for index, block in enumerate(blocks):
            if not block.is_intact():
                raise WrongContents(f"{when}: block {index} of {len(blocks)} does not hold what was written to it")

    def row(
        self,
        case: Case,
        shape: object,
        operation: str,
        size: int,
        values: Sequence[float],
        limit: Sequence[float] = (),
        limit_name: str = "",
        target: float | None = None,
        notes: str = "",
    ) -> Row:
        """The row of these measurements, as ours or as the peer's."""
        if self.is_peer:
            return Row(case.name, str(shape), operation, size, peer=values)
        return Row(case.name, str(shape), operation, size, values, (), limit, limit_name, target, notes)


class Case(ABC):
    """One case of the benchmarks.

    Attributes:
        name: The name for `--cases`.
        shapes: The shapes to measure. Each runs in a process of its own.
        repetitions, peer_repetitions: Measurements in one process, by default. 0 for the peer: it cannot run the case.
        processes: How many fresh processes measure, one after the other.
        host_bytes: The most host memory that the case uses. Before all cases a process uses as much. 0: it is not needed.
    """

    name = ""
    shapes: tuple[Shape, ...] = ()
    repetitions = 7
    peer_repetitions = 2
    processes = 1
    host_bytes = 0

    @abstractmethod
    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        """Measures one shape, which is scaled already. Returns the rows.

        Raises:
            Unavailable: The library or the machine lacks what the case needs.
        """


def live_and_dead_sizes(total: int, part: float, smallest: int, largest: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of sizes in bytes: of a block that stays and of the block after it that is freed. `part` of the sum stays.

    Both sizes are spread evenly over the orders of magnitude. They are multiples of 512 within [smallest, largest].
    """
    chooser = random.Random(seed)
    times = (1 - part) / part  # the size of a dead block divided by that of the live block before it
    low, high = max(smallest, smallest / times), min(largest, largest / times)
    pairs: list[tuple[int, int]] = []
    made = 0
    while made < total:
        live = low * (high / low) ** chooser.random()
        pair = (int(live) // 512 * 512, int(live * times) // 512 * 512)
        pairs.append(pair)
        made += sum(pair)
    return pairs
