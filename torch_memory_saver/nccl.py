"""A hook that releases the device memory of NCCL communicators while a tag is paused.

It suspends two kinds of communicators, which need NCCL 2.29.7 (``ncclCommSuspend``): those of process groups, by
``suspend()`` and ``resume()`` of their backend, which PyTorch 2.12 has; and others, such as those of PyNccl, by their handle
and the library that made them. If a communicator cannot be suspended, its memory stays, and :meth:`NcclHook.what_stays`
reports it.

Both calls are collective: each rank of a communicator waits for the others. So all ranks have to pause and resume the same
tags in the same order, each with memory of the tag. For this reason the communicators are suspended *after* a pause and
resumed *after* a resume, so that a rank has suspended if and only if its memory is paused. A rank whose pause fails has
nothing to undo, and the others wait for it in NCCL; once its pause has been repeated with success they all go on. If it had
been suspended before its pause, it would have to resume alone, and would wait for ranks that have paused.

The communicators are taken in the given order, or process groups in the order of their creation, which PyTorch requires to
be the same on all ranks.

NCCL refuses to suspend a communicator twice. So a hook asks NCCL for the state first, and leaves alone what is suspended:
an engine such as vLLM may suspend its communicators itself. It resumes only what it has suspended and is still suspended.

Nothing is imported before a call finds torch imported. Callbacks run on the thread of a pause or resume. A hook holds its
lock while it suspends and resumes, because two threads may pause different tags at once. Nothing else takes the lock. It is
reentrant, because a finalizer or a signal handler may call the hook on the thread that holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch_memory_saver._services import HookCall, InterruptSafeLock, nccl_communicators, register_hook

__all__ = ["NcclHook", "suspend_on_pause"]

logger = logging.getLogger("torch_memory_saver")


class NcclHook:
    """The registration that :func:`suspend_on_pause` returns."""

    def __init__(self, tag: str | Iterable[str] | None, groups: tuple[Any, ...] | None) -> None:
        self._groups = None if groups is None else nccl_communicators.from_pairs(groups)
        self._lock = InterruptSafeLock()
        self._suspended: dict[str, nccl_communicators.Communicator] = {}  # by name
        self._logged: set[str] = set()
        self._registrations = [register_hook("resume", tag, "after", self._after_resume)]  # first: a signal may follow
        self._registrations.append(register_hook("pause", tag, "after", self._after_pause))
        nccl_communicators.add_handles(self._groups or ())

    def __repr__(self) -> str:
        return f"<NcclHook: {', '.join(self._suspended) or 'nothing'} suspended now, {self._registrations[-1]}>"

    @property
    def suspended(self) -> tuple[str, ...]:
        """The names of the communicators that this hook has suspended, in the order in which they were suspended.

        The name is that of the process group, or the handle in hexadecimal, such as ``"0x55d0c8a0b2c0"``.
        """
        return tuple(self._suspended)

    def what_stays(self) -> str | None:
        """Return sentences about the communicators that keep device memory during a pause, or None.

        They name communicators that cannot be suspended, with the reason, and say how much NCCL keeps of those that were
        suspended, such as buffers of NVLS. The size is known after the first suspension.
        """
        return nccl_communicators.describe_unreleased(self._communicators())

    def suspend(self) -> None:
        """Suspend the communicators that are not suspended.

        The call is collective, like :meth:`resume`. If a communicator fails, those before it stay suspended until the next
        resume.

        Raises:
            TorchMemorySaverError: NCCL fails, for a communicator by handle. PyTorch raises its own exception.
        """
        self._lock.call(self._suspend)

    def resume(self) -> None:
        """Resume the communicators that this hook has suspended, in the order in which they were suspended.

        The call is collective. If a communicator fails, it and those after it stay suspended: call the method again, on all
        ranks.

        Raises:
            TorchMemorySaverError: NCCL fails, for a communicator by handle. PyTorch raises its own exception.
        """
        self._lock.call(self._resume)

    def remove(self) -> None:
        """End the registration.

        Suspended communicators stay suspended until :meth:`resume` is called.
        """
        for registration in self._registrations:
            registration.remove()
        nccl_communicators.remove_handles(self._groups or ())

    def _suspend(self) -> None:
        found = self._communicators()
        self._log(logging.WARNING, nccl_communicators.describe_unsuspendable(found))
        for communicator in found:
            if communicator.why_not() is None:
                nccl_communicators.suspend(communicator, self._suspended)
        self._log(logging.INFO, nccl_communicators.describe_kept(found))

    def _resume(self) -> None:
        for name, communicator in list(self._suspended.items()):
            nccl_communicators.resume(communicator)
            self._suspended.pop(name, None)

    def _after_pause(self, call: HookCall) -> None:
        self.suspend()

    def _after_resume(self, call: HookCall) -> None:
        self.resume()

    def _communicators(self) -> list[nccl_communicators.Communicator]:
        return nccl_communicators.communicators(self._groups)

    def _log(self, level: int, sentences: Iterable[str]) -> None:
        """Log each sentence that this hook has not logged yet."""
        for sentence in sentences:
            if sentence not in self._logged:
                self._logged.add(sentence)
                logger.log(level, "%s", sentence)


def suspend_on_pause(tag: str | Iterable[str] | None = None, groups: Iterable[Any] | None = None) -> NcclHook:
    """Suspend NCCL communicators after each pause of a tag, and resume them after its resume.

    Call this function on every rank, with the same arguments. With several tags the first pause suspends the communicators,
    and the first resume resumes them. Collective calls must not be made on the communicators in between.

    A communicator that is suspended already, for example by vLLM, is left alone, also at the resume.

    Args:
        tag: One tag or pattern, or an iterable of them, see :meth:`TorchMemorySaver.on_pause`. Every rank needs memory of
            the tag: the hook is not called on a rank without it, and the other ranks wait for that rank.
        groups: Process groups, and pairs (handle, library) of other communicators, in an order that is the same on all
            ranks. For a PyNccl communicator of vLLM or SGLang the pair is ``(pynccl.comm, pynccl.nccl.lib)``. The handle is
            an ``ncclComm_t`` as an int or a ``ctypes.c_void_p``, and the library is the ``ctypes.CDLL`` that made it. None
            selects all process groups that exist at the pause, in the order of their creation, and no other communicators.

    Raises:
        InvalidArgumentError: `tag` is not a tag, or a pair is not that of a communicator.
    """
    return NcclHook(tag, None if groups is None else tuple(groups))
