"""Operations of a model as rules of hypothesis: the state machine that a test gives its World, and how it is run."""

from __future__ import annotations

import abc
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hypothesis import HealthCheck, note, seed, settings, strategies
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from model_choice import DrawnChoice

#: How often the steps may depend on which of two threads comes first before that is a failure.
ATTEMPTS = 12


class AnyWorld(Protocol):
    """The model's state, with the operations that have led to it."""

    steps: deque[str]

    def check(self) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...


class Rules(RuleBasedStateMachine):
    """Makes a world, compares everything after every step, and prints the steps when one fails."""

    world: AnyWorld
    #: Of all machines of this class: whether a step or a comparison has ever failed.
    found = False

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        self.world = self.begin()

    @abc.abstractmethod
    def begin(self) -> AnyWorld:
        """A world in which nothing has happened yet."""

    def guarded(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except Flaky:
            self.failed = True
            raise
        except Exception:
            self.failed = type(self).found = True
            note("\n".join(self.world.steps))
            raise

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        self.guarded(self.world.check)

    def teardown(self) -> None:
        if self.failed:
            self.world.abandon()
        else:
            self.world.end()


def add_rule(machine: type[Rules], operation: Callable[[Any, Any], bool], name: str) -> None:
    """One operation as a rule of the machine; its decisions are drawn."""

    def step(self: Rules, data: Any) -> None:
        self.guarded(lambda: operation(self.world, DrawnChoice(data)))

    step.__name__ = operation.__name__
    setattr(machine, name, rule(data=strategies.data())(step))


def run(machine: type[Rules], examples: int, steps: int) -> None:
    """Lets hypothesis run the machine.

    Which thread meets an injected failure, and so what there is to choose from afterwards, is not the same each time, and
    hypothesis gives up when it sees that. If no failure occurred until then it begins again, with other steps.
    """
    machine.found = False
    for attempt in range(ATTEMPTS):
        try:
            run_state_machine_as_test(
                seed(random.getrandbits(64))(machine) if attempt else machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
            return
        except Flaky:
            if machine.found or attempt + 1 == ATTEMPTS:
                raise
