"""The turns of calls with hooks: two pauses or resumes whose tags overlap run one after the other (hooks.py says why).

Any thread may call. One condition guards the turns. It is not held while a call runs.
"""

from __future__ import annotations

import math
import os
import threading
import time

from torch_memory_saver._torch.records.tags import Tags

__all__ = ["CallTurn"]

_turns_changed = threading.Condition()
_running: list[CallTurn] = []


class CallTurn:
    """The turn of one call with hooks. Give it back on every path; giving back a turn that is not held does nothing."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    def take(self, deadline: float = math.inf) -> bool:
        """Wait until no other call with hooks has one of the tags, and return whether the turn was taken.

        The wait ends at the deadline, in seconds of :func:`time.monotonic`.
        """
        with _turns_changed:
            while any(self._overlaps(other) for other in _running):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                _turns_changed.wait(min(remaining, threading.TIMEOUT_MAX))
            _running.append(self)
        return True

    def give_back(self) -> None:
        """End the turn, so that waiting calls continue."""
        with _turns_changed:
            if self in _running:
                _running.remove(self)
            _turns_changed.notify_all()

    def _overlaps(self, other: CallTurn) -> bool:
        return self._tags is None or other._tags is None or not set(self._tags).isdisjoint(other._tags)


def _after_fork_in_child() -> None:
    global _turns_changed
    _turns_changed = threading.Condition()  # another thread may have held its lock
    _running.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
