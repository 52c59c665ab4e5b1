"""A hook that releases the device memory of NCCL communicators while a tag is paused.

It uses ``suspend()`` and ``resume()`` of a process group's backend, which PyTorch 2.12 has and which need NCCL 2.29.7
(``ncclCommSuspend``). Where a process group has no such backend its memory stays, and :meth:`NcclHook.what_stays` says so.

Both are collective: each rank of the group waits for the others. So all ranks have to pause and resume the same tags in the
same order, each with memory of the tag. This decides the moment: the communicators are suspended *after* a pause and resumed
*after* a resume, so that a rank has suspended if and only if its memory is paused. A rank whose pause fails has nothing to
undo, and the others wait for it in NCCL; once its pause has been repeated with success they all go on. If it had been
suspended before its pause, it would have to resume alone, and would wait for ranks that have paused.

The groups are taken in the order of their creation, which PyTorch requires to be the same on all ranks, or in the given one.
Communicators of other libraries are not known here.

Nothing is imported before a call finds torch imported. Callbacks come on the thread of a pause or resume. The lock of a hook
is held while it suspends and resumes, for two threads that pause different tags at once; nothing else takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_memory_saver._saver.hook_registry import register
from torch_memory_saver._torch import layer
from torch_memory_saver.pause_hooks import HookCall

__all__ = ["NcclHook", "suspend_on_pause", "what_stays"]

logger = logging.getLogger("torch_memory_saver")

#: The first NCCL with ncclCommSuspend.
_FIRST_NCCL = (2, 29, 7)


class _Communicator(NamedTuple):
    name: str
    backend: Any


class NcclHook:
    """The registration of :func:`suspend_on_pause`."""

    def __init__(self, tag: str | Iterable[str] | None, groups: tuple[Any, ...] | None) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._suspended: list[_Communicator] = []
        self._has_logged = False
        self._handles = [register("pause", tag, "after", self._after_pause)]
        self._handles.append(register("resume", tag, "after", self._after_resume))

    @property
    def suspended(self) -> tuple[str, ...]:
        """The names of the process groups that are suspended now, in the order in which they were."""
        return tuple(communicator.name for communicator in self._suspended)

    def what_stays(self) -> str | None:
        """One sentence about the communicators whose memory stays on the device during a pause, with the reason. None if all
        can be suspended, or there are none."""
        return what_stays(self._groups)

    def suspend(self) -> None:
        """Suspends the communicators that are not suspended. Collective, like :meth:`resume`. If one fails, those before it
        stay suspended, until the next resume."""
        with self._lock:
            self._log_what_stays()
            suspended = {id(communicator.backend) for communicator in self._suspended}
            for communicator in _communicators(self._groups):
                if id(communicator.backend) in suspended or _why_not(communicator.backend) is not None:
                    continue
                communicator.backend.suspend()
                self._suspended.append(communicator)

    def resume(self) -> None:
        """Resumes the communicators that are suspended, in the order in which they were. If one fails, it and those after it
        stay suspended: call it again, on all ranks."""
        with self._lock:
            while self._suspended:
                self._suspended[0].backend.resume()
                del self._suspended[0]

    def remove(self) -> None:
        """Ends the registration. What is suspended stays so, until :meth:`resume` is called."""
        for handle in self._handles:
            handle.remove()

    def _after_pause(self, call: HookCall) -> None:
        self.suspend()

    def _after_resume(self, call: HookCall) -> None:
        self.resume()

    def _log_what_stays(self) -> None:
        """Once for each hook."""
        if self._has_logged:
            return
        sentence = self.what_stays()
        if sentence is not None:
            self._has_logged = True
            logger.warning("%s", sentence)


def suspend_on_pause(tag: str | Iterable[str] | None = None, groups: Iterable[Any] | None = None) -> NcclHook:
    """Has the communicators of NCCL process groups suspended after each pause of a tag, and resumed after its resume.

    To be called on every rank, with the same arguments. With several tags the first pause suspends, and the first resume
    resumes. Collective calls must not be made on the groups in between.

    Args:
        tag: As for :meth:`TorchMemorySaver.on_pause`. Every rank needs memory of the tag: one without is not called, and the
            others wait for it.
        groups: Process groups, in an order that is the same on all ranks. None: all that exist at the pause, in the order of
            their creation.

    Raises:
        InvalidArgumentError: Not a tag.
    """
    return NcclHook(tag, None if groups is None else tuple(groups))


def what_stays(groups: Iterable[Any] | None = None) -> str | None:
    """One sentence about the communicators whose memory no hook can release, with the reason. None if all can be suspended,
    or there are none. Makes no call of NCCL.

    Args:
        groups: Process groups. None: all that exist.
    """
    staying = [(each, reason) for each in _communicators(groups) if (reason := _why_not(each.backend)) is not None]
    if not staying:
        return None
    names = ", ".join(repr(communicator.name) for communicator, _ in staying)
    many = len(staying) > 1
    return (
        f"The NCCL communicator{'s' if many else ''} of process group{'s' if many else ''} {names} "
        f"keep{'' if many else 's'} {'their' if many else 'its'} device memory during a pause: {staying[0][1]}."
    )


def _communicators(groups: Iterable[Any] | None) -> list[_Communicator]:
    """Those that exist, in the order in which all ranks take them."""
    torch = layer.imported()
    found = []
    for group in _groups_of_this_process(torch) if groups is None else groups:
        backend = _nccl_backend(torch, group)
        if backend is not None and _has_communicator(backend):
            found.append(_Communicator(str(group.group_name), backend))
    return found


def _groups_of_this_process(torch: Any) -> tuple[Any, ...]:
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ()
    return tuple(distributed.distributed_c10d._world.pg_map)


def _nccl_backend(torch: Any, group: Any) -> Any:
    """The backend for CUDA tensors, if it is NCCL's; else None."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has none for CUDA
        return None
    return backend if backend.name() == "nccl" else None


def _has_communicator(backend: Any) -> bool:
    """Whether it has made one: PyTorch does so at the first collective call, unless the group is bound to a device."""
    pointer = getattr(backend, "_comm_ptr", None)
    return pointer is None or pointer() != 0


def _why_not(backend: Any) -> str | None:
    """Why a communicator cannot be suspended, or None."""
    if not hasattr(backend, "suspend") or not hasattr(backend, "resume"):
        version = getattr(layer.imported(), "__version__", "")
        return f"PyTorch {version} has no suspend() of a process group's backend, which PyTorch 2.12 has"
    version_of_nccl = getattr(backend, "get_runtime_nccl_version", None)
    version = None if version_of_nccl is None else tuple(version_of_nccl())
    if version is not None and version < _FIRST_NCCL:
        return f"NCCL {_dotted(version)} has no ncclCommSuspend, which NCCL {_dotted(_FIRST_NCCL)} has"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
