"""A hook that releases the device memory of NCCL communicators while a tag is paused.

It uses ``suspend()`` and ``resume()`` of a process group's backend, which PyTorch 2.12 has and which need NCCL 2.29.7
(``ncclCommSuspend``). If a process group has no such backend, its memory stays, and :meth:`NcclHook.what_stays` reports it.

Both are collective: each rank of the group waits for the others. So all ranks have to pause and resume the same tags in the
same order, each with memory of the tag. For this reason the communicators are suspended *after* a pause and resumed
*after* a resume, so that a rank has suspended if and only if its memory is paused. A rank whose pause fails has nothing to
undo, and the others wait for it in NCCL; once its pause has been repeated with success they all go on. If it had been
suspended before its pause, it would have to resume alone, and would wait for ranks that have paused.

The groups are taken in the order of their creation, which PyTorch requires to be the same on all ranks, or in the given one.

Nothing is imported before a call finds torch imported. Callbacks run on the thread of a pause or resume. A hook holds its
lock while it suspends and resumes, because two threads may pause different tags at once. Nothing else takes the lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

from torch_memory_saver._services import Communicator, HookCall, communicators, register_hook, what_stays, why_not

__all__ = ["NcclHook", "suspend_on_pause", "what_stays"]

logger = logging.getLogger("torch_memory_saver")


class NcclHook:
    """The registration that :func:`suspend_on_pause` returns."""

    def __init__(self, tag: str | Iterable[str] | None, groups: tuple[Any, ...] | None) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._suspended: list[Communicator] = []
        self._has_logged = False
        self._handles = [register_hook("pause", tag, "after", self._after_pause)]
        self._handles.append(register_hook("resume", tag, "after", self._after_resume))

    @property
    def suspended(self) -> tuple[str, ...]:
        """The names of the process groups that are suspended now, in the order in which they were suspended."""
        return tuple(communicator.name for communicator in self._suspended)

    def what_stays(self) -> str | None:
        """Return a sentence about the communicators whose memory stays on the device during a pause, or None.

        The sentence gives the reason. None means that all communicators can be suspended, or that there are none.
        """
        return what_stays(self._groups)

    def suspend(self) -> None:
        """Suspend the communicators that are not suspended.

        The call is collective, like :meth:`resume`. If a communicator fails, those before it stay suspended until the next
        resume.
        """
        with self._lock:
            self._log_what_stays()
            suspended = {id(communicator.backend) for communicator in self._suspended}
            for communicator in communicators(self._groups):
                if id(communicator.backend) in suspended or why_not(communicator.backend) is not None:
                    continue
                communicator.backend.suspend()
                self._suspended.append(communicator)

    def resume(self) -> None:
        """Resume the suspended communicators, in the order in which they were suspended.

        The call is collective. If a communicator fails, it and those after it stay suspended: call the method again, on all
        ranks.
        """
        with self._lock:
            while self._suspended:
                self._suspended[0].backend.resume()
                del self._suspended[0]

    def remove(self) -> None:
        """End the registration.

        Suspended communicators stay suspended until :meth:`resume` is called.
        """
        for handle in self._handles:
            handle.remove()

    def _after_pause(self, call: HookCall) -> None:
        self.suspend()

    def _after_resume(self, call: HookCall) -> None:
        self.resume()

    def _log_what_stays(self) -> None:
        """Log the sentence of :meth:`what_stays` once for each hook."""
        if self._has_logged:
            return
        sentence = self.what_stays()
        if sentence is not None:
            self._has_logged = True
            logger.warning("%s", sentence)


def suspend_on_pause(tag: str | Iterable[str] | None = None, groups: Iterable[Any] | None = None) -> NcclHook:
    """Suspend the communicators of NCCL process groups after each pause of a tag, and resume them after its resume.

    Call this function on every rank, with the same arguments. With several tags the first pause suspends the communicators,
    and the first resume resumes them. Collective calls must not be made on the groups in between.

    Args:
        tag: One tag or pattern, or an iterable of them, see :meth:`TorchMemorySaver.on_pause`. Every rank needs memory of
            the tag: the hook is not called on a rank without it, and the other ranks wait for that rank.
        groups: Process groups, in an order that is the same on all ranks. None selects all groups that exist at the pause,
            in the order of their creation.

    Raises:
        InvalidArgumentError: `tag` is not a tag.
    """
    return NcclHook(tag, None if groups is None else tuple(groups))
