"""The steps that are made before this package uses PyTorch for the first time in a process.

A step may raise, and a signal handler may raise in it or between two steps. The next use then continues with the steps that
have not returned, so each step must be possible to repeat. Until all have returned, no other thread uses PyTorch by this
package: it waits for the lock that is held during the steps. The lock is reentrant, because a step may use PyTorch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import InterruptSafeLock, SingleUseScope

__all__ = ["FirstUse"]

_Made = TypeVar("_Made")


class FirstUse(Generic[_Made]):
    """The first use of PyTorch in a process.

    Args:
        make: Returns the object for the module torch. Called until it returns.
        steps: Returns the steps for that object. Called before each step, which may add others to the end.

    Attributes:
        is_complete: Whether all steps have returned.
    """

    def __init__(self, make: Callable[[Any], _Made], steps: Callable[[_Made], Sequence[Callable[[], object]]]) -> None:
        self._make = make
        self._steps = steps
        self._lock = InterruptSafeLock()
        self._made: _Made | None = None
        self._returned = 0  # number of steps
        self.is_running = False
        self.is_complete = False

    def proceed(self, torch: Any) -> _Made:
        """Make the remaining steps, and return the object. A step that calls this gets the object at once."""
        made: _Made = self._lock.call(self._proceed, torch)
        return made

    def _proceed(self, torch: Any) -> _Made:
        if self._made is None:
            self._made = self._make(torch)
        if not self.is_running and not self.is_complete:
            _core.within(_Running(self), self._run, self._made)
        return self._made

    def _run(self, made: _Made) -> None:
        while self._returned < len(steps := self._steps(made)):
            steps[self._returned]()
            self._returned += 1
        self.is_complete = True


class _Running(SingleUseScope):
    """A context manager inside which the steps are being made."""

    def __init__(self, first_use: FirstUse[Any]) -> None:
        self._first_use = first_use

    def _begin(self) -> None:
        self._first_use.is_running = True

    def _end(self) -> None:
        self._first_use.is_running = False
