"""Waiting until another thread has changed something.

The waiting thread holds no lock, in contrast to that of a condition variable: a signal handler that raises ends the wait and
leaves nothing locked. The caller protects the state that its condition reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["Notifier"]


class Notifier:
    """Wakes the threads that wait for a change. Any thread."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[None]] = []

    def notify(self) -> None:
        """Has every waiting thread evaluate its condition again. To be called after each change; may be repeated."""
        for queue in list(self._waiting):
            if queue.empty():
                queue.put(None)

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition holds, at most until the deadline, in seconds of :func:`time.monotonic`. Returns whether
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
