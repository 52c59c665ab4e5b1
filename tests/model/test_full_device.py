"""Guards what runs may cost on a full device: a program that loads once and cycles never fails where a handle for each
allocation succeeds; one that churns succeeds once it has done what the message about slack says. Memory held beyond that
of the allocations is the reported slack, never more.

Programs are random, each by its seed. `steady` ones run twice, with runs and without. For the others the plain sum of what
is resident says what a handle for each allocation would need.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from model_choice import RandomChoice
from model_machine import GRANULARITY, MIB, Machine

from torch_memory_saver import _core, errors

SEEDS = 15
STEPS = 60
CYCLES = 6
#: Allocations of a tag of which some are freed in each cycle.
CHURNING = 16
#: A tag that frees one of so many keeps its runs.
FEW = 12
DEVICE = 0
ROOM = 64 * MIB
TAGS = ("weights", "cache", "graph")
_numbers = itertools.count()


@dataclass
class Segment:
    tag: str
    address: int
    bytes: int
    resident: bool = True
    resumed: bool = False


@dataclass
class Program:
    """What a program has done: its memory on a device where it has ROOM bytes, less what others take.

    Its tags are its own, because the core remembers what a tag has done.
    """

    machine: Machine
    runs: bool = True
    number: int = field(default_factory=lambda: next(_numbers))
    segments: list[Segment] = field(default_factory=list)
    named: list[str] = field(default_factory=list)  # tags that messages about slack have named, in the order of the failures
    others: int = 0  # bytes that others have taken of ROOM

    def __post_init__(self) -> None:
        with self.machine.context(DEVICE):
            pass
        self.before = self.machine.usage(DEVICE).physical_bytes
        self.machine.take(DEVICE, _core.device_memory(DEVICE).free - ROOM)

    def tag(self, name: str) -> str:
        return f"{name} of full device {self.number}"

    # What it holds.

    def of(self, name: str, *, resident: bool) -> list[Segment]:
        return [one for one in self.segments if one.tag == self.tag(name) and one.resident == resident]

    def resident(self) -> int:
        return sum(one.bytes for one in self.segments if one.resident)

    def fits(self, size: int) -> bool:
        """Whether so much more fits, if every allocation has a handle of its own."""
        return self.resident() + size + self.others <= ROOM

    def slack(self, name: str | None = None) -> int:
        if name is None:
            return _core.counters()["slack_bytes"]
        return next((row.slack_bytes for row in _core.usage(self.tag(name)) if row.tag == self.tag(name)), 0)

    def check(self) -> None:
        """No byte more than is resident and than is reported."""
        held = self.machine.usage(DEVICE).physical_bytes - self.before
        assert held == self.resident() + self.slack(), f"{held} bytes held, {self.resident()} resident, {self.slack()} slack"
        assert _core.counters()["resident_bytes"] == self.resident()

    # What it does. Each returns whether there was memory enough.

    def allocate(self, name: str, size: int) -> bool:
        _core.region_set(self.tag(name), _core.BACKUP_NONE, True, _core.HOST_DEFAULT, self.runs)
        try:
            address = _core.allocate(size, DEVICE)
        except errors.OutOfMemoryError as error:
            return self.has_failed(error, size) and self.allocate(name, size)
        self.segments.append(Segment(self.tag(name), address, size))
        return True

    def free(self, segment: Segment) -> None:
        assert _core.free(segment.address)
        self.segments.remove(segment)

    def pause(self, name: str) -> None:
        _core.pause((self.tag(name),), None)
        for segment in self.of(name, resident=True):
            segment.resident = False
        assert self.slack(name) == 0

    def resume(self, name: str) -> bool:
        paused = self.of(name, resident=False)
        try:
            _core.resume((self.tag(name),), None)
        except errors.OutOfMemoryError as error:
            return self.has_failed(error, sum(one.bytes for one in paused)) and self.resume(name)
        for segment in paused:
            segment.resident = segment.resumed = True
        return True

    def others_take(self, size: int) -> None:
        """As much of it as there is."""
        size = min(max(size, -self.others), _core.device_memory(DEVICE).free)
        self.machine.take(DEVICE, size)
        self.others += size

    # Slack where memory is short.

    def has_failed(self, error: errors.OutOfMemoryError, size: int) -> bool:
        """Whether slack was the reason. If so, the program does what the message says."""
        if not self.fits(size):
            return False
        assert self.slack() > 0, f"{size} bytes fit, and nothing is slack: {error}"
        assert "are slack" in str(error), error
        found = re.findall(r"'(\w+) of full device \d+'", str(error).partition("are slack")[2])
        assert found, error
        self.named += found
        tags = tuple(map(self.tag, found))
        _core.pause(tags, None, backup=_core.BACKUP_PINNED)
        _core.resume(tags, None)
        assert [self.slack(name) for name in found] == [0] * len(found)
        self.check()
        return True

    def end(self) -> None:
        for segment in list(self.segments):
            self.free(segment)
        self.machine.take(DEVICE, -self.machine.taken[DEVICE])
        assert self.machine.usage(DEVICE).physical_bytes == self.before
        assert self.slack() == 0


@pytest.fixture
def machine(simulator: Any) -> Iterator[Machine]:
    """The settings of this thread's regions are as before afterwards."""
    found, machine = _core.region_current(), Machine()
    yield machine
    _core.region_set(found.tag, found.backup, found.managed, _core.HOST_DEFAULT, found.runs)
    machine.take(DEVICE, -machine.taken[DEVICE])


def choose_size(choose: RandomChoice) -> int:
    return choose.weighted((1, 2, 3, 8), (6, 3, 2, 1)) * GRANULARITY


# -- programs that load once and cycle -------------------------------------------------------------------------------------


def steady(program: Program, choose: RandomChoice) -> list[Any]:
    """Loads, with buffers that are freed while it loads, and then cycles; a paused part may be freed. Returns what
    succeeded, and how much it held after each step."""
    done: list[Any] = []
    for name in TAGS:
        for _ in range(choose.integer(3, 12)):
            done.append(program.allocate(name, choose_size(choose)))
        temporary = [one for one in program.segments if not one.resumed and choose.integer(0, 4) == 0]
        for segment in temporary:
            program.free(segment)
        if choose.integer(0, 1):
            program.pause(name)
        program.check()
    for _ in range(STEPS):
        name = choose.pick(TAGS)
        kind = choose.integer(0, 9)
        size = choose.integer(-8, 4) * GRANULARITY
        if kind < 4:
            program.pause(name)
        elif kind < 8:
            done.append(program.resume(name))
        elif kind == 8:
            program.others_take(size)
        else:
            for segment in program.of(name, resident=False)[:1]:
                program.free(segment)
        program.check()
        assert program.slack() == 0
        done.append(program.resident())
    return done


@pytest.mark.slow
def test_a_program_that_loads_once_and_cycles_fails_only_where_handles_of_their_own_fail(machine: Machine) -> None:
    refused = granted = 0
    for seed in range(SEEDS):
        outcomes = []
        for runs in (False, True):
            program = Program(machine, runs)
            outcomes.append(steady(program, RandomChoice(seed)))
            program.end()
        assert outcomes[0] == outcomes[1], f"seed {seed}"
        refused += sum(outcome is False for outcome in outcomes[0])
        granted += sum(outcome is True for outcome in outcomes[0])
    assert refused >= SEEDS, "the device was not full"
    assert granted >= SEEDS * len(TAGS)


# -- programs that churn ---------------------------------------------------------------------------------------------------


def churn(program: Program, choose: RandomChoice) -> int:
    """Returns how often an allocation needed no memory."""
    reused = 0
    for name in TAGS:
        for _ in range(choose.integer(4, 10)):
            program.allocate(name, GRANULARITY)
    for _ in range(STEPS):
        name = choose.pick(TAGS)
        kind = choose.integer(0, 9)
        if kind < 3:
            size, before = choose_size(choose), program.slack(name)
            if program.allocate(name, size):
                reused += program.slack(name) < before
        elif kind < 6:
            resident = program.of(name, resident=True)
            for segment in resident[:: choose.pick((2, FEW, FEW))]:
                program.free(segment)
        elif kind < 7:
            program.others_take(choose.pick((-ROOM, choose.integer(0, 4) * GRANULARITY, ROOM)))
        else:
            program.pause(name)
            program.check()
            program.resume(name)
        program.check()
    return reused


@pytest.mark.slow
def test_a_program_that_churns_succeeds_once_it_returns_the_slack_that_a_message_names(machine: Machine) -> None:
    named = reused = 0
    for seed in range(SEEDS):
        program = Program(machine)
        try:
            reused += churn(program, RandomChoice(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        named += len(program.named)
        program.end()
    assert reused > 0, "no slack was reused"
    assert named > 0, "memory was never short because of slack"


@pytest.mark.parametrize("seed", range(8))
def test_a_churning_tag_has_no_slack_from_its_second_cycle_on(machine: Machine, seed: int) -> None:
    """It leaves more than an eighth of its bytes as slack at its first pause, and frees as much in each later cycle."""
    choose, program = RandomChoice(seed), Program(machine)
    for cycle in range(CYCLES):
        while len(program.segments) < CHURNING:  # while it is paused: none is in the way of an earlier one
            assert program.allocate("weights", GRANULARITY)
        program.pause("weights")
        assert program.resume("weights")
        resident = program.of("weights", resident=True)
        for _ in range(choose.integer(CHURNING // 8 + 1, CHURNING // 2)):
            resident.remove(victim := choose.pick(resident))
            program.free(victim)
            program.check()
            assert (program.slack() > 0) == (cycle == 0)
        if cycle > 0 and choose.integer(0, 1):
            assert program.allocate("weights", GRANULARITY)
            assert program.slack() == 0
        program.pause("weights")
    program.end()
