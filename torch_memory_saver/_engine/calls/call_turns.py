"""The turns of calls with hooks: two pauses or resumes whose tags overlap run one after the other (hook_calls.py says why).

Any thread may call. A lock guards the begin of a turn. It is not held while a call waits or runs.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

from torch_memory_saver._torch.base.steps import InterruptSafeLock, Notifier, SingleUseScope
from torch_memory_saver._torch.records.tags import Tags
from torch_memory_saver.errors import InvalidStateError

__all__ = ["CallTurn"]

_lock = InterruptSafeLock()
_ended = Notifier()
_running: list[CallTurn] = []


class CallTurn(SingleUseScope):
    """A context manager inside which a call with hooks has its turn. Its entry waits for other calls of the tags.

    Args:
        operation: "pause" or "resume".
        tags: Tags of the call.
        deadline: Time at which the wait ends, in seconds of :func:`time.monotonic`.

    Raises:
        InvalidStateError: Another call still had the turn at the deadline.
    """

    def __init__(self, operation: str, tags: Tags, deadline: float) -> None:
        self._operation = operation
        self._tags = tags
        self._deadline = deadline

    def _begin(self) -> None:
        if not _ended.wait_until(partial(_lock.call, self._take), self._deadline):
            raise InvalidStateError(
                f"{self._operation}: another pause or resume of these tags, which calls hooks, did not end within the "
                "timeout. Wait for it, or pass a longer timeout",
                operation=self._operation,
            )

    def _take(self) -> bool:
        """Take the turn unless another call has it. Return whether it was taken."""
        if any(self._overlaps(other) for other in list(_running)):
            return False
        _running.append(self)
        return True

    def _overlaps(self, other: CallTurn) -> bool:
        return self._tags is None or other._tags is None or not set(self._tags).isdisjoint(other._tags)

    def give_back(self) -> None:
        """End the turn, so that waiting calls continue. May be repeated."""
        with contextlib.suppress(ValueError):  # it has ended already
            _running.remove(self)
        _ended.notify()

    _end = give_back


def _after_fork_in_child() -> None:
    global _lock, _ended
    _lock, _ended = InterruptSafeLock(), Notifier()  # other threads may have held their locks
    _running.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
