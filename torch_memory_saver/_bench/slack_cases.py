"""The cases of slack: what was freed inside a large handle, and what the next allocations get of it.

Every other allocation of the second half is freed, which is a quarter of all. Each has a neighbour that stays, in the same
handle; the first few allocations of a tag may have none.
"""

from __future__ import annotations

from .core_calls import CoreCalls
from .figures import AT_MOST, MEMORY, Row, Target
from .savers import Ours
from .setting import MIB, Case, Setting, Shape

__all__ = ["Churn", "Slack"]

_SHAPE = Shape(8192, 2 * MIB)


def _free_a_quarter(core: CoreCalls, allocations: list[int]) -> int:
    """Frees a quarter of the allocations, which are removed from the list. Returns how many those are."""
    quarter = slice(len(allocations) // 2 + 1, None, 2)
    chosen = allocations[quarter]
    core.free(chosen)
    del allocations[quarter]
    return len(chosen)


def _must_be(when: str, found: int, expected: int) -> None:
    """Raises AssertionError unless the bytes are the same: the case would measure something else."""
    assert found == expected, f"{when}: {found} bytes of slack, and not {expected}; with TMS_RUNS=0 there is none"


class Slack(Case):
    """A quarter of the allocations are freed after a resume, and as many made again, in C loops. Only the allocations are
    timed, because a free waits for the device. Each repetition has a tag of its own."""

    name = "slack"
    title = "an allocation that reuses slack, through the C core"
    shapes = (_SHAPE,)
    peer_repetitions = 0
    repetitions = 15
    warm_up = 1
    limit_s = 2e-6

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        core = CoreCalls(setting.device.ordinal)
        times = [self._reuse(setting, shape, core, f"{self.name} {n}") for n in range(self.warm_up + setting.repetitions)]
        return [setting.row(self, shape, "allocate", 0, times[self.warm_up :], [self.limit_s], "2 us", Target(AT_MOST, 1.0))]

    def _reuse(self, setting: Setting, shape: Shape, core: CoreCalls, tag: str) -> float:
        """The seconds of one allocation in slack."""
        saver = setting.saver
        assert isinstance(saver, Ours)
        with saver.region(tag, "none", "release"):
            kept, _ = core.allocate(shape.count, shape.size)
            saver.pause(tag)
            saver.resume(tag)
            freed = _free_a_quarter(core, kept)
            _must_be("after the frees", saver.slack_bytes(), freed * shape.size)
            again, seconds = core.allocate(freed, shape.size)
            _must_be("after the allocations", saver.slack_bytes(), 0)
        core.free([*kept, *again])
        return seconds / freed


class Churn(Case):
    """Measures bytes. In each cycle a quarter of the allocations are freed after the resume, and as many made after the next
    one. What a tag frees in its first cycle is slack until the pause. A tag that left so much has none from its second cycle
    on. "held" is the device memory that is gone beside what is in use, as the driver counts it: the slack, and what else the
    driver needs. Each repetition has a tag of its own."""

    name = "churn"
    title = "slack of a tag that frees a quarter in each cycle"
    shapes = (_SHAPE,)
    peer_repetitions = 0
    repetitions = 3
    #: In each repetition. A tag that frees little for two of them may have slack again.
    later_cycles = 4

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        core = CoreCalls(setting.device.ordinal)
        found: dict[str, list[float]] = {}
        for repetition in range(setting.repetitions):
            self._repeat(setting, shape, core, f"{self.name} {repetition}", found)
        freed = found.pop("freed")
        return [
            setting.row(self, shape, operation, 0, found[operation], limit, name, Target(MEMORY, at_most))
            for operation, limit, name, at_most in (
                ("after frees", freed, "what was freed", 0),
                ("held", freed, "what was freed", None),
                ("after the pause", [0], "none", 0),
                ("later cycles", [0], "none", 0),
            )
        ]

    def _repeat(self, setting: Setting, shape: Shape, core: CoreCalls, tag: str, found: dict[str, list[float]]) -> None:
        saver = setting.saver
        assert isinstance(saver, Ours)
        free_before, _ = setting.device.memory()
        with saver.region(tag, "none", "release"):
            kept, _ = core.allocate(shape.count, shape.size)
            for cycle in range(1 + self.later_cycles):
                saver.pause(tag)
                if cycle:
                    found.setdefault("after the pause", []).append(saver.slack_bytes())
                saver.resume(tag)
                kept += core.allocate(shape.count - len(kept), shape.size)[0]
                freed = _free_a_quarter(core, kept) * shape.size
                slack = saver.slack_bytes()
                if cycle:
                    found.setdefault("later cycles", []).append(slack)
                    continue
                _must_be("after the frees of the first cycle", slack, freed)
                found.setdefault("after frees", []).append(slack)
                found.setdefault("freed", []).append(freed)
                gone = free_before - setting.device.memory()[0]
                found.setdefault("held", []).append(max(0, gone - len(kept) * shape.size))
        core.free(kept)
