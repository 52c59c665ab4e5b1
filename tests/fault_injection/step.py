"""A call under test, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from machine import Call


@dataclass
class Outcome:
    """The outcome of one call: the exception it raised, if any, and the problems found."""

    error: BaseException | None
    problems: list[str]
    fired: int
    calls: list[Call]


@dataclass
class Step:
    """The call under test. `verify` gets the states before, the exception or None, and the names of the failed calls;
    `retry` is what a user does once the cause of a failure is gone."""

    run: Callable[[], None]
    verify: Callable[[dict[int, int], BaseException | None, set[str]], list[str]]
    retry: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    #: What the call may report besides the injected failure, because it is true: (call, code).
    causes: set[tuple[str, int]] = field(default_factory=set)
    #: Codes of the driver that the call waits out, or that defer it.
    waits_for: set[int] = field(default_factory=set)
    #: Out of memory for a handle of several allocations, it tries smaller ones.
    halves: bool = False
    #: Functions that may fail unnoticed in this scenario only.
    tolerates: set[str] = field(default_factory=set)
    #: A failure may leave something allocated: objects created once a process. Or something is gone, because
    #: another thread freed it during the step.
    keeps: bool = False
    #: No caller gets its failure, so one message in the log stands for all failed calls.
    logs_its_end: bool = False
