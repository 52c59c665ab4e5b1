"""NCCL communicators of PyTorch's process groups: which exist, and which keep their device memory during a pause.

Makes no call of NCCL and imports nothing. Communicators of other libraries are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_memory_saver._torch import layer

__all__ = ["Communicator", "communicators", "what_stays", "why_not"]

#: The first NCCL with ncclCommSuspend.
_FIRST_NCCL = (2, 29, 7)


class Communicator(NamedTuple):
    name: str
    backend: Any


def what_stays(groups: Iterable[Any] | None = None) -> str | None:
    """Return one sentence about the communicators whose memory no hook can release, with the reason. None if all can be
    suspended, or if there are none. Makes no call of NCCL.

    Args:
        groups: Process groups. None: all that exist.
    """
    staying = [(each, reason) for each in communicators(groups) if (reason := why_not(each.backend)) is not None]
    if not staying:
        return None
    names = ", ".join(repr(communicator.name) for communicator, _ in staying)
    many = len(staying) > 1
    return (
        f"The NCCL communicator{'s' if many else ''} of process group{'s' if many else ''} {names} "
        f"keep{'' if many else 's'} {'their' if many else 'its'} device memory during a pause: {staying[0][1]}."
    )


def communicators(groups: Iterable[Any] | None) -> list[Communicator]:
    """Return the communicators that exist, in the order in which all ranks take them."""
    torch = layer.imported()
    found = []
    for group in _groups_of_this_process(torch) if groups is None else groups:
        backend = _nccl_backend(torch, group)
        if backend is not None and _has_communicator(backend):
            found.append(Communicator(str(group.group_name), backend))
    return found


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
    return backend if backend.name() == "nccl" else None


def _has_communicator(backend: Any) -> bool:
    """Return whether the backend has made its communicator. PyTorch makes it at the first collective call, unless the group
    is bound to a device."""
    pointer = getattr(backend, "_comm_ptr", None)
    return pointer is None or pointer() != 0


def why_not(backend: Any) -> str | None:
    """Return why a communicator cannot be suspended, or None if it can."""
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
