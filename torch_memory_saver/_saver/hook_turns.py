"""The turns of calls that have hooks: two calls whose tags overlap run one after the other, with all their callbacks.

Otherwise two threads that pause the same tag would both find it resident and call every callback twice; and a resume that
begins during the before-callbacks of a pause would find nothing to do, and then resume without callbacks what that pause has
paused meanwhile. Calls of different tags, and calls in a process without hooks, do not wait for each other here.

A turn is not a lock: it blocks only callers of pause and resume, and no callback, allocation or free waits for it. A
callback that waits for another thread's pause or resume of the same tags waits for ever, as one that is called during a copy
does. A resume that may wait for other processes gives its turn back after its before-callbacks, because a pause by another
thread may be what it waits for.

Any thread. Waiting on the main thread is ended by a signal whose handler raises. The lock of the condition is held for the
look at the list only.
"""

from __future__ import annotations

import math
import os
import threading
import time

from torch_memory_saver._torch.pools import Tags

__all__ = ["HookTurn"]

_changed = threading.Condition()
_running: list[HookTurn] = []


class HookTurn:
    """The turn of one call. To be given back on every path; a turn that was not taken may be given back as well."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    def take(self, deadline: float = math.inf) -> bool:
        """Wait until no other call with hooks has one of the tags, at most until the deadline, in seconds of
        :func:`time.monotonic`. Returns whether the turn was taken."""
        with _changed:
            while any(self._overlaps(other) for other in _running):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                _changed.wait(min(remaining, threading.TIMEOUT_MAX))
            _running.append(self)
        return True

    def give_back(self) -> None:
        """Lets others go on. Does nothing the second time."""
        with _changed:
            if self in _running:
                _running.remove(self)
            _changed.notify_all()

    def _overlaps(self, other: HookTurn) -> bool:
        return self._tags is None or other._tags is None or not set(self._tags).isdisjoint(other._tags)


def _after_fork_in_child() -> None:
    global _changed
    _changed = threading.Condition()  # another thread may have held its lock
    _running.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
