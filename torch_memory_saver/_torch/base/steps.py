"""Steps and waits that a signal handler may interrupt without harm.

A handler, such as that of Ctrl-C, may raise between any two bytecodes. Regions, captures and the saver's own state lose
nothing: what was begun is finished or undone. No lock stays held, and no routing stays in force. Only pools may be lost:

- an empty pool, some hundred bytes, that was made and not yet recorded, or that was about to be recorded again;
- a replaced pool, where a pause or ``empty_cache()`` replaces the pools of a region that it is inside, or a program takes
  pools over under a name of the C++ package. No region uses the pool again, and its idle memory stays.

Python runs signal handlers between bytecodes. A change that must not be separated from its record is therefore one call of C
code (``_core.record_each`` and ``_core.move``), which itself calls C code only, such as the functions of PyTorch and of the
native core. After an exception the record says whether the change was made, and the step can be repeated.

``_core.Scope`` (csrc/python/scope.c) repeats such steps. Context managers that must not be left half-way derive from it.

A lock that a signal handler must not leave held is taken by ``_core.within``, also in the bookkeeping of pools. ``with
lock:`` is not enough: Python 3.14 runs handlers after the acquisition and before the block, which then releases nothing
(CPython issue 148874). The lock is an RLock, because signal handlers and finalizers run on the thread that holds it: the
garbage collector may begin wherever that thread allocates an object or calls a function (:class:`InterruptSafeLock`).

A thread that waits for another one holds no lock (:class:`Notifier`), unlike a thread that waits for a condition variable. A
signal handler that raises ends the wait and leaves nothing locked. The caller protects the state that its condition reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch_memory_saver import _core

__all__ = ["InterruptSafeExitStack", "InterruptSafeLock", "Notifier", "SingleUseScope", "call_each"]

_Result = TypeVar("_Result")


class SingleUseScope(_core.Scope):
    """The base class of context managers whose object is entered once."""

    def _begin(self) -> Any:
        """Take effect, and return the result of the with statement. After an exception :meth:`_end` undoes what was done."""

    def _end(self) -> None:
        """Undo :meth:`_begin`. Repeated until it returns."""

    def _open(self) -> None:
        pass

    def _choose(self) -> None:
        pass

    def _enter(self, entry: None) -> Any:
        return self._begin()

    def _leave(self, entry: None) -> None:
        self._end()

    def _left(self, entry: None, exception: BaseException | None) -> None:
        pass


def call_each(steps: Iterator[partial[Any]]) -> None:
    """Call the remaining steps, which the iterator records: repeating this continues after the one that failed."""
    deque(map(partial.__call__, steps), maxlen=0)


class InterruptSafeExitStack:
    """Context managers that were entered and are left together, as contextlib.ExitStack does. A signal handler that raises
    leaves none of them in force."""

    def __init__(self) -> None:
        self._entered: list[tuple[AbstractContextManager[Any], Iterator[tuple[None, None, None]]]] = []
        self._left: list[tuple[AbstractContextManager[Any], Iterator[tuple[None, None, None]]]] = []
        self._returned: list[object] = []  # the results of the exits

    def enter(self, manager: AbstractContextManager[Any]) -> None:
        """Enter a context manager whose exit also undoes an interrupted entry."""
        self.add(manager)
        manager.__enter__()

    def add(self, manager: AbstractContextManager[Any]) -> None:
        """Add a context manager that the caller has entered, or enters next."""
        self._entered.append((manager, iter([(None, None, None)])))

    def leave(self) -> None:
        """Leave the context managers, the last one first, each once. May be repeated."""
        while self._entered:
            manager, calls = self._entered[-1]
            _core.record_each(self._returned, manager.__exit__, calls)
            _core.move(self._entered, self._left)

    @property
    def has_succeeded(self) -> bool:
        """Whether all exits have returned."""
        return len(self._left) == len(self._returned)


class InterruptSafeLock:
    """A reentrant lock under which functions are called, and which no signal handler leaves held. A function must expect
    that a finalizer calls another one between two of its steps."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return the result of a function that is called with the lock held."""
        return _core.within(self._lock, function, *arguments)


class Notifier:
    """A notifier of changes, which wakes the threads that wait for one. Any thread may call."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[None]] = []

    def notify(self) -> None:
        """Make every waiting thread evaluate its condition again. To be called after each change; may be repeated."""
        for queue in list(self._waiting):
            if queue.empty():
                queue.put(None)

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition holds, at most until the deadline, in seconds of :func:`time.monotonic`. Return whether
        it holds. A signal whose handler raises ends the wait on the main thread."""
        queue: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(queue)  # before the condition is evaluated, so that no change is missed
        try:
            while not holds():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                try:
                    queue.get(timeout=min(remaining, threading.TIMEOUT_MAX))
                except Empty:
                    continue
            return True
        finally:
            self._waiting.remove(queue)
