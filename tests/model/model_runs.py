"""The model's knowledge of runs: which kinds of allocations get them, what a free leaves in them as slack, and what an
allocation may reuse.

Which addresses lie on one physical handle, and in one reservation, the driver says (`Machine.mapping` and `reservation`),
never the core. So the core's slack is compared with what is mapped and belongs to no allocation.

The core remembers a kind as long as the process lives, so its Kind is kept here, of every World.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from model_allocations import ACTIVE, Allocation

from torch_memory_saver import errors

if TYPE_CHECKING:
    from model_machine import Span
    from model_world import World

#: Which the core reads once. Without runs there is no slack either.
RUNS = os.environ.get("TMS_RUNS") != "0"
#: A kind shares no handles at a resume if more than this part of it was freed since the last one.
FREED_DIVISOR = 8


class KindKey(NamedTuple):
    """What the allocations of one run have in common."""

    tag: str
    backup: int
    policy: int
    device: int


@dataclass
class Kind:
    """The counts that decide whether neighbours of a kind share a handle. None: unknown after a failure."""

    resumed: int | None = 0  # bytes that its last resume has brought back
    freed: int | None = 0  # of these, that were freed while they were resident

    def shares(self) -> bool | None:
        """None: unknown."""
        if self.freed is None or self.resumed is None:
            return None
        return self.freed <= self.resumed // FREED_DIVISOR

    def doubt(self) -> None:
        """A call that failed may have counted it, or not."""
        self.resumed = self.freed = None


#: Of this process.
_kinds: dict[KindKey, Kind] = {}


def key_of(allocation: Allocation) -> KindKey:
    return KindKey(allocation.tag, allocation.backup, allocation.policy, allocation.device)


def kind_of(allocation: Allocation) -> Kind:
    return _kinds.setdefault(key_of(allocation), Kind())


# What lies where. All of it is exact only while `world.clean`.


def with_memory(world: World) -> list[Allocation]:
    """The allocations that hold memory, those included whose free waits."""
    return [one for one in [*world.allocations, *world.deferred, *world.leaving] if one.state == ACTIVE]


def runs_of(allocations: Iterable[Allocation]) -> dict[Span, list[Allocation]]:
    """By the addresses of the run, each with its allocations in the order of their addresses."""
    runs: dict[Span, list[Allocation]] = {}
    for allocation in sorted(allocations, key=lambda one: one.address):
        assert allocation.run is not None, allocation.described()
        runs.setdefault(allocation.run, []).append(allocation)
    return runs


def slack_in(run: Span, members: Iterable[Allocation]) -> int:
    return run.bytes - sum(one.reserved for one in members)


def slack(world: World, device: int | None = None, tag: str | None = None) -> int:
    """Of one device, of one tag, or all."""
    runs = runs_of(with_memory(world))
    chosen = ((run, of) for run, of in runs.items() if device in (None, of[0].device) and tag in (None, of[0].tag))
    return sum(slack_in(run, members) for run, members in chosen)


def has_slack(world: World, allocation: Allocation) -> bool:
    """Whether its run has slack."""
    assert allocation.run is not None
    return slack_in(allocation.run, runs_of(with_memory(world))[allocation.run]) > 0


def _holes(run: Span, members: list[Allocation]) -> list[int]:
    """The sizes of the parts that belong to no allocation."""
    ends = [run.address, *(one.address + one.reserved for one in members)]
    begins = [*(one.address for one in members), run.address + run.bytes]
    return [begin - end for begin, end in zip(begins, ends, strict=True) if begin > end]


def reusable(world: World, key: KindKey, size: int) -> bool:
    """Whether the slack of the kind has room for an allocation: it needs no driver call then. A call that pauses the
    allocations of a run keeps its slack from others."""
    usable = (
        (run, members)
        for run, members in runs_of(with_memory(world)).items()
        if key_of(members[0]) == key and not any(one in world.in_call for one in members)
    )
    return any(hole >= size for run, members in usable for hole in _holes(run, members))


# What happens.


def allocated(world: World, allocation: Allocation) -> bool:
    """Notes where it lies. Whether it has reused slack."""
    machine = world.machine
    allocation.range = machine.reservation(allocation.address)
    allocation.run = machine.mapping(allocation.address)
    return allocation.run != allocation.span


def freed(world: World, allocation: Allocation) -> None:
    """An allocation that held memory has been released."""
    if not allocation.resumed:
        return
    kind = kind_of(allocation)
    exact = world.clean and world.rule is None
    kind.freed = kind.freed + allocation.reserved if exact and kind.freed is not None else None


def doubt(allocations: Iterable[Allocation]) -> None:
    """A call has failed, or they were freed during one. Their kinds may have learnt of it, or not."""
    for allocation in allocations:
        kind_of(allocation).doubt()


def memory_was_short(world: World, error: BaseException, exact: bool = True) -> None:
    """If this is an out-of-memory error, it names the slack of its device."""
    if not isinstance(error, errors.OutOfMemoryError) or not (world.clean and exact) or error.device is None:
        return
    device, message = error.device, str(error)
    assert ("are slack" in message) == (slack(world, device) > 0), f"{slack(world, device)} bytes of slack: {message}"
    for run, members in runs_of(with_memory(world)).items():
        if members[0].device == device and slack_in(run, members):
            assert f"'{members[0].tag}'" in message, message


# The layout of a resume.


def resumed(world: World, allocations: list[Allocation], exact: bool) -> None:
    """Note where these lie now, and how much of each kind they are. The runs of a resume hold nothing else. `exact`: nothing
    has failed, and nothing was freed during the call, so neighbours that may share a run do."""
    for allocation in allocations:
        allocation.run = world.machine.mapping(allocation.address)
        allocation.resumed = True
    for run, members in runs_of(allocations).items():
        assert slack_in(run, members) == 0 or not exact, f"resumed with slack: {run}, {members}"
        assert len({(key_of(one), one.runs) for one in members}) == 1, f"one run: {[one.described() for one in members]}"
        assert len(members) == 1 or all(_may_share(one) is not False for one in members), f"in no run: {members}"
    if exact:
        _check_neighbours(world, allocations)
    kinds = {key_of(one): kind_of(one) for one in allocations}
    for key, kind in kinds.items():
        kind.resumed = sum(one.reserved for one in allocations if key_of(one) == key) if exact else None
        kind.freed = 0 if exact else None


def _check_neighbours(world: World, allocations: list[Allocation]) -> None:
    ordered = sorted(allocations, key=lambda one: one.address)
    for before, after in itertools.pairwise(ordered):
        together = before.range == after.range and before.address + before.reserved == after.address
        if together and _may_share(before) and _may_share(after):
            told = (
                f"{before.described()}, {after.described()}, {kind_of(before)}, {world.free_bytes(before.device)} bytes free"
            )
            assert before.run == after.run, f"neighbours with a run each: {told}"


def _may_share(allocation: Allocation) -> bool | None:
    """Whether a run may back others, too; None: unknown."""
    return kind_of(allocation).shares() if RUNS and allocation.runs else False
