"""What PyTorch's ``torch.cuda.memory._record_memory_history`` accepts, and the call that a request becomes.

The function is private and differs between releases. What a release accepts is read from the function itself, so a release
that this package does not know is called with the arguments that it still has:

- 2.0: ``enabled`` is a bool, the bound is ``trace_alloc_max_entries``, and only the device of the call is recorded.
- since 2.1: ``enabled`` is "all", "state" or None, the bound is ``max_entries``, and every device is recorded.
- later ones add ``clear_history`` (in 2.11, not in 2.6) and ``record_pinned_host_memory`` (in 2.15, not in 2.11).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch_memory_saver.errors import InvalidStateError

__all__ = ["Call", "Request", "call_for", "call_to_stop"]

#: The fewest entries that torch 2.0 keeps. It has no mode without a history.
_FEWEST_ENTRIES_OF_2_0 = 1


@dataclass(frozen=True)
class Request:
    """What is to be recorded: the arguments of :func:`torch_memory_saver.memory.record_history`."""

    mode: str
    context: str
    stacks: str
    max_entries: int
    record_host: bool
    clear_history: bool


@dataclass(frozen=True)
class Call:
    """A call of ``_record_memory_history``.

    Attributes:
        arguments: By name.
        unsupported: Those of the request that this release cannot fulfil.
        each_device: Whether the call acts on the device in its argument ``device`` only, so that each needs its own.
    """

    arguments: Mapping[str, Any]
    unsupported: tuple[str, ...]
    each_device: bool


def call_for(accepted: Collection[str], request: Request) -> Call:
    """The call that starts the recording with a function that accepts these arguments.

    Raises:
        InvalidStateError: The function accepts no limit of entries: without one the history grows for ever.
    """
    if "max_entries" in accepted:
        wanted: dict[str, Any] = {
            "enabled": request.mode,
            "context": request.context,
            "stacks": request.stacks,
            "max_entries": request.max_entries,
        }
    elif "trace_alloc_max_entries" in accepted:
        whole_history = request.mode == "all"
        wanted = {
            "enabled": True,
            "record_context": True,
            "trace_alloc_max_entries": request.max_entries if whole_history else _FEWEST_ENTRIES_OF_2_0,
            "trace_alloc_record_context": whole_history and request.context != "state",
        }
        if request.stacks == "all":
            wanted["_enable_expensive_cpp"] = True
    else:
        raise InvalidStateError(
            "record_history: this release of PyTorch accepts no limit of entries, only "
            f"{', '.join(accepted)}: use one from 2.0 to 2.15, or call its _record_memory_history yourself",
            operation="record_history",
        )
    if request.record_host:
        wanted["record_pinned_host_memory"] = True
    if request.clear_history:
        wanted["clear_history"] = True
    return Call(
        arguments={name: value for name, value in wanted.items() if name in accepted},
        unsupported=tuple(_REQUESTED_AS.get(name, name) for name in wanted if name not in accepted),
        each_device=_acts_on_one_device(accepted),
    )


#: Our names of arguments that PyTorch calls otherwise.
_REQUESTED_AS = {"record_pinned_host_memory": "record_host", "_enable_expensive_cpp": "stacks"}


def call_to_stop(accepted: Collection[str], host: bool) -> Call:
    """The call that ends the recording, of pinned host memory as well if that is recorded."""
    one_device = _acts_on_one_device(accepted)
    arguments: dict[str, Any] = {"enabled": False if one_device else None}
    if host:
        arguments["record_pinned_host_memory"] = True
    return Call(arguments, (), one_device)


def _acts_on_one_device(accepted: Collection[str]) -> bool:
    return "max_entries" not in accepted
