"""NCCL communicators of PyTorch's process groups, and those that a hook has by handle.

Lists them, suspends and resumes one, and describes what keeps device memory. Imports nothing. Only `suspend`, `resume` and
`describe_held` call NCCL. The ledger has no hook, so the module keeps for it the handles of all hooks, and the bytes that
NCCL keeps of suspended communicators. Each step on these two collections is atomic under the GIL, so there is no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch_memory_saver._text import binary_size
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.distributed.nccl_handles import HandleCommunicator, Statistics, why_too_old

__all__ = [
    "Communicator",
    "add_handles",
    "communicators",
    "describe_held",
    "describe_kept",
    "describe_unreleased",
    "describe_unsuspendable",
    "from_pairs",
    "remove_handles",
    "resume",
    "suspend",
]

#: Names of PyTorch's two NCCL backends. The second is the default of PyTorch 2.15.
_BACKENDS = ("nccl", "nccl2")


class GroupCommunicator(NamedTuple):
    """The communicator of a process group. `backend` is the group's ProcessGroupNCCL."""

    name: str
    backend: Any

    def why_not(self) -> str | None:
        """Return why the communicator cannot be suspended, or None if it can."""
        if not all(hasattr(self.backend, name) for name in ("suspend", "resume", "memory_stats")):
            version = getattr(layer.imported(), "__version__", "")
            return f"PyTorch {version} has no suspend() of a process group's backend, which PyTorch 2.12 has"
        version_of_nccl = getattr(self.backend, "get_runtime_nccl_version", None)
        return None if version_of_nccl is None else why_too_old(tuple(version_of_nccl()))

    def statistics(self) -> Statistics:
        """Return the state of the communicator."""
        values = self.backend.memory_stats()
        return Statistics(values["suspended"] != 0, values["persist"])

    def held_bytes(self) -> int:
        """Return the device memory that the communicator holds now."""
        values = self.backend.memory_stats()
        return int(values["total"] - (values["suspend"] if values["suspended"] else 0))

    def suspend(self) -> None:
        self.backend.suspend()

    def resume(self) -> None:
        self.backend.resume()


Communicator = GroupCommunicator | HandleCommunicator

#: Communicators by handle of the hooks that are registered.
_handles: list[HandleCommunicator] = []
#: Bytes that NCCL does not release, of each suspended communicator, by its name.
_kept_bytes: dict[str, int] = {}


def add_handles(groups: Iterable[Any]) -> None:
    """Make the communicators by handle among `groups` known to the ledger."""
    _handles.extend(each for each in groups if isinstance(each, HandleCommunicator))


def remove_handles(groups: Iterable[Any]) -> None:
    """Undo `add_handles`. A second call does nothing."""
    for each in groups:
        if isinstance(each, HandleCommunicator) and each in _handles:
            _handles.remove(each)


def from_pairs(groups: Iterable[Any]) -> tuple[Any, ...]:
    """Return `groups` with a communicator in place of each pair of a handle and a library.

    Raises:
        InvalidArgumentError: A pair is not that of a communicator.
    """
    return tuple(HandleCommunicator(*_pair(each)) if isinstance(each, tuple) else each for each in groups)


def suspend(communicator: Communicator, suspended: dict[str, Communicator]) -> None:
    """Suspend a communicator, and record it in `suspended` by its name. Do nothing if it is suspended or destroyed.

    The call blocks until all ranks have made it, so a signal handler often raises at its end. Therefore the record is made
    before the call, and is removed only if NCCL says that the communicator is not suspended. `resume` skips it otherwise.
    """
    statistics = communicator.statistics()
    if statistics is None or statistics.suspended:
        return
    try:
        suspended.pop(communicator.name, None)  # what an interrupted `resume` has left would keep its place in the order
        suspended[communicator.name] = communicator
        _kept_bytes[communicator.name] = statistics.kept_bytes
        communicator.suspend()
        suspended[communicator.name] = communicator  # a finalizer that has called `resume` since then has removed it
    except BaseException:
        with contextlib.suppress(Exception):  # of a communicator that was aborted
            statistics = communicator.statistics()
            if statistics is None or not statistics.suspended:
                suspended.pop(communicator.name, None)
                _kept_bytes.pop(communicator.name, None)
        raise


def resume(communicator: Communicator) -> None:
    """Resume a communicator that `suspend` has suspended, unless it was resumed or destroyed since then."""
    statistics = communicator.statistics()
    if statistics is not None and statistics.suspended:
        communicator.resume()
    _kept_bytes.pop(communicator.name, None)


def describe_unreleased(found: Sequence[Communicator] | None = None) -> str | None:
    """Return sentences about the communicators that keep device memory during a pause, with the reasons. None if there are
    none. Makes no call of NCCL, so what suspended communicators keep is known after their suspension.

    Args:
        found: Communicators. None selects those of all process groups, and the handles of all hooks.
    """
    found = [*communicators(None), *communicators(_handles)] if found is None else found
    return " ".join((*describe_unsuspendable(found), *describe_kept(found))) or None


def describe_unsuspendable(found: Iterable[Communicator]) -> Iterator[str]:
    """Return a sentence for each reason for which communicators cannot be suspended."""
    by_reason: dict[str, dict[str, Communicator]] = {}
    for each in found:
        if (reason := each.why_not()) is not None:
            by_reason.setdefault(reason, {})[each.name] = each
    for reason, communicators_of_it in by_reason.items():
        subject, many = _subject(list(communicators_of_it.values()))
        yield f"{subject} {'keep their' if many else 'keeps its'} device memory during a pause: {reason}."


def describe_kept(found: Iterable[Communicator]) -> Iterator[str]:
    """Return a sentence about the memory that NCCL keeps of suspended communicators, if there is any."""
    keeping = {each.name: each for each in found if _kept_bytes.get(each.name)}
    for kind in (GroupCommunicator, HandleCommunicator):
        of_kind = [each for each in keeping.values() if isinstance(each, kind)]
        if of_kind:
            subject, many = _subject(of_kind)
            size = binary_size(sum(_kept_bytes.get(each.name, 0) for each in of_kind))
            yield (
                f"{subject} keep{'' if many else 's'} {size} of device memory while suspended: NCCL releases no persistent "
                "memory, such as buffers of NVLS."
            )


def describe_held() -> str | None:
    """Return a sentence about the device memory of all process groups' communicators, by NCCL's own figures. None if they
    hold none, or none reports a figure, as before PyTorch 2.12 and NCCL 2.29.7."""
    found: list[GroupCommunicator] = []
    size = 0
    for each in communicators(None):
        if isinstance(each, GroupCommunicator) and each.why_not() is None:
            try:
                size += each.held_bytes()
            except RuntimeError:  # it was aborted since
                continue
            found.append(each)
    if not size:
        return None
    subject, many = _subject(found)
    return f"{subject} hold{'' if many else 's'} {binary_size(size)} of device memory by NCCL's own figure."


def communicators(groups: Iterable[Any] | None) -> list[Communicator]:
    """Return the communicators that exist, in the order in which all ranks take them. None: those of all process groups."""
    torch = layer.imported()
    found: list[Communicator] = []
    for group in _groups_of_this_process(torch) if groups is None else groups:
        if isinstance(group, HandleCommunicator):
            if group.exists():
                found.append(group)
        elif (backend := _nccl_backend(torch, group)) is not None and _has_communicator(backend):
            found.append(GroupCommunicator(str(group.group_name), backend))
    return found


def _pair(each: tuple[Any, ...]) -> tuple[Any, Any]:
    return (each[0], each[1]) if len(each) == 2 else (each, None)


def _subject(found: Sequence[Communicator]) -> tuple[str, bool]:
    """Return the subject of a sentence about communicators of one kind, and whether it is a plural."""
    many = len(found) > 1
    s = "s" if many else ""
    if isinstance(found[0], HandleCommunicator):
        return f"The NCCL communicator{s} {', '.join(each.name for each in found)}", many
    return f"The NCCL communicator{s} of process group{s} {', '.join(repr(each.name) for each in found)}", many


def _groups_of_this_process(torch: Any) -> tuple[Any, ...]:
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ()
    return tuple(distributed.distributed_c10d._world.pg_map)


def _nccl_backend(torch: Any, group: Any) -> Any:
    """Return the backend for CUDA tensors if it is NCCL's, else None."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has none for CUDA
        return None
    return backend if backend.name() in _BACKENDS else None


def _has_communicator(backend: Any) -> bool:
    """Return whether the backend has made its communicator. PyTorch makes it at the first collective call, unless the group
    is bound to a device."""
    pointer = getattr(backend, "_comm_ptr", None)
    return pointer is None or pointer() != 0
