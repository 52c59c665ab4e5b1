"""Threads of the model: each executes operations on request, and has regions of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch_memory_saver import _core


class Worker:
    """A thread that executes one operation after another on request."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, results = task
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

    def start(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Starts the operation; returns a function that waits for its end, and returns or raises what it did."""
        results: SimpleQueue[Any] = SimpleQueue()
        self._tasks.put((function, results))

        def join() -> Any:
            result, error = results.get()
            if error is not None:
                raise error
            return result

        return join

    def call(self, function: Callable[[], Any]) -> Any:
        return self.start(function)()

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join()


@dataclass
class Level:
    tag: str
    backup: int
    managed: bool
    policy: int = _core.HOST_DEFAULT
    runs: bool = True


@dataclass
class Actor:
    """A thread: the main one, or a worker."""

    name: str
    worker: Worker | None
    levels: list[Level] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the levels
    bottom: Level = field(default_factory=lambda: Level("default", _core.BACKUP_NONE, False))

    def call(self, function: Callable[[], Any]) -> Any:
        return function() if self.worker is None else self.worker.call(function)
