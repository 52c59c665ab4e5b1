"""The orders of all ranks in simulated time: a forward waits for the stage before, a backward for the stage after.

A chunk is stage ``chunk * ranks + rank`` of the model (Narayanan et al., *Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM*, arXiv 2104.04473, section 2.2). Sending takes no time, and no rank waits for a receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_memory_saver.errors import InvalidArgumentError

from .orders import passes

__all__ = ["Bubble", "Timeline", "Work", "run_orders"]


@dataclass(frozen=True)
class Work:
    """A forward or a backward that runs one micro-batch in one chunk.

    Attributes:
        chunk: The chunk on its rank.
        microbatch: The micro-batch.
        backward: Whether it is a backward.
        start: The time at which it begins, in the unit of the durations. The step begins at 0.
        end: The time at which it ends.
    """

    chunk: int
    microbatch: int
    backward: bool
    start: float
    end: float


@dataclass(frozen=True)
class Bubble:
    """The time in which a rank waits.

    It is the same for all ranks, because all have the same work.

    Attributes:
        of_ideal: The time as a fraction of the time that the work alone takes. It may be above 1.
        of_step: The time as a fraction of the step, from the first start to the last end on any rank. It is below 1.
    """

    of_ideal: float
    of_step: float


@dataclass(frozen=True)
class Timeline:
    """The work of every rank over time.

    Attributes:
        ranks: The work of each rank, sorted by start.
        step: The time that passes from the first start to the last end on any rank.
        ideal: The time that the work of one rank takes.
    """

    ranks: tuple[tuple[Work, ...], ...]
    step: float
    ideal: float

    @property
    def bubble(self) -> Bubble:
        """The time in which a rank waits, measured on this timeline."""
        return Bubble((self.step - self.ideal) / self.ideal, (self.step - self.ideal) / self.step)


#: Whether it is a backward, the stage, and the micro-batch.
_Key = tuple[bool, int, int]


class _Rank:
    """One rank while the orders run."""

    def __init__(self, rank: int, ranks: int, order: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        found = passes(order)
        self.last = ranks * len({item.chunk for item in found}) - 1
        tasks = [(item.forward, False, item) for item in found] + [(item.backward, True, item) for item in found]
        self.tasks = [(backward, item.chunk, item.microbatch) for _, backward, item in sorted(tasks, key=lambda t: t[0])]
        self.work: list[Work] = []

    @property
    def now(self) -> float:
        return self.work[-1].end if self.work else 0

    def key(self) -> _Key:
        """Return the next work of this rank."""
        backward, chunk, microbatch = self.tasks[len(self.work)]
        return backward, chunk * self.ranks + self.rank, microbatch

    def needed(self) -> _Key | None:
        """Return the work of another stage that the next work needs, or None.

        A backward on the last stage needs its own forward, which came before it.
        """
        backward, stage, microbatch = self.key()
        other = stage + (1 if backward else -1)
        return (backward, other, microbatch) if 0 <= other <= self.last else None

    def run(self, ends: dict[_Key, float], durations: tuple[float, float]) -> bool:
        """Run all work that need not wait, and return whether anything ran."""
        before = len(self.work)
        while len(self.work) < len(self.tasks):
            needed = self.needed()
            if needed is not None and needed not in ends:
                break
            start = self.now if needed is None else max(self.now, ends[needed])
            backward, chunk, microbatch = self.tasks[len(self.work)]
            key, end = self.key(), start + durations[backward]
            self.work.append(Work(chunk, microbatch, backward, start, end))
            ends[key] = end
        return len(self.work) > before

    def waiting(self) -> str:
        backward, chunk, microbatch = self.tasks[len(self.work)]
        name = "backward" if backward else "forward"
        return f"rank {self.rank} at position {len(self.work)}, the {name} of chunk {chunk} for micro-batch {microbatch}"


def run_orders(orders: Sequence[Sequence[int]], forward: float = 1, backward: float = 2) -> Timeline:
    """Run the orders of all ranks, each as early as its own order and the other stages permit.

    Args:
        orders: The order of each rank.
        forward: How long a forward of one chunk takes, in any unit.
        backward: How long a backward of one chunk takes, in the same unit.

    Raises:
        InvalidArgumentError: The ranks wait for each other for ever, an order cannot be read (`passes`), the orders differ
            in their chunks or micro-batches, or a duration is not above 0.
    """
    if not (forward > 0 and backward > 0):
        raise InvalidArgumentError(f"the durations are {forward} and {backward}: both must be above 0")
    if not orders or not all(orders):
        raise InvalidArgumentError("there must be a rank, and each must have an order that is not empty")
    ranks = [_Rank(number, len(orders), order) for number, order in enumerate(orders)]
    for rank in ranks[1:]:
        if sorted(rank.tasks) != sorted(ranks[0].tasks):
            raise InvalidArgumentError(f"rank {rank.rank} has other chunks or micro-batches than rank 0")
    ends: dict[_Key, float] = {}
    while any(rank.run(ends, (forward, backward)) for rank in ranks):
        pass
    waiting = [rank.waiting() for rank in ranks if len(rank.work) < len(rank.tasks)]
    if waiting:
        raise InvalidArgumentError(
            f"the orders cannot be run, because ranks would wait for each other for ever: {'; '.join(waiting)}"
        )
    ideal = len(ranks[0].tasks) / 2 * (forward + backward)
    return Timeline(tuple(tuple(rank.work) for rank in ranks), max(rank.now for rank in ranks), ideal)
