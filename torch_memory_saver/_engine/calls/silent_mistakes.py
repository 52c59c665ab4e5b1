"""Calls that do nothing, or less than their caller expects, without an error. Each is explained by one warning.

A program may have a reason for such a call: an engine pauses a tag before it allocates anything. So none is an exception.
Nothing is looked up for a call that found what it was called for.
"""

from __future__ import annotations

import logging

from torch_memory_saver import _core
from torch_memory_saver._text import suggestion, warn_once
from torch_memory_saver._torch.binding.layer import TorchCuda, devices_in_use
from torch_memory_saver._torch.records.tags import Tags
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.options import WILDCARDS

__all__ = ["warn_of_empty_pause", "warn_of_receivers", "warn_of_unknown_tags"]

logger = logging.getLogger("torch_memory_saver")

_MIB = 1 << 20
#: The known tags that a message lists.
_MAX_TAGS = 10
#: The operations that only list memory.
_QUERIES = ("preserved", "stats")
#: Hooks are registered before their memory is allocated. Only a similar tag shows that one is misspelled.
_EARLY = ("on_pause", "on_resume")


def warn_of_unknown_tags(operation: str, tags: Tags) -> str:
    """Warn of each tag that no allocation ever had, once for the tag. Return what each report prints about these tags.

    Without any allocation there is no warning, because it could not name the tag that was meant, and a later one can.
    """
    if not tags:
        return ""
    every_tag = _core.tags()
    unknown = [tag for tag in tags if not every_tag.get(tag)]
    known = list(dict.fromkeys(row.tag for row in _core.segments())) if unknown else []
    for tag in unknown if known else ():
        similar = suggestion(tag, known)
        if operation in _EARLY and not similar:
            continue
        entered = " (a region of it was entered, but nothing was allocated there)" if tag in every_tag else ""
        warn_once(
            f"unknown tag {tag}",
            "%s: no allocation ever had %s %r%s, so %s. Tags of allocations now: %s%s",
            operation,
            "the tag" if tag in every_tag or WILDCARDS.isdisjoint(tag) else "a tag that matches the pattern",
            tag,
            entered,
            "nothing of it is listed" if operation in _QUERIES else "there is nothing to do for it",
            _listed(known),
            similar or ".",
        )
    meant = next((text for tag in unknown if (text := suggestion(tag, known))), "")
    return f"no memory has tag {_listed(unknown)}; tags are: {_listed(known)}{meant}" if unknown else ""


def _listed(tags: list[str]) -> str:
    names = ", ".join(map(repr, tags[:_MAX_TAGS])) or "none"
    return names + (f" and {len(tags) - _MAX_TAGS} more" if len(tags) > _MAX_TAGS else "")


def warn_of_empty_pause(torch: TorchCuda | None) -> None:
    """Warn of a pause that found nothing, if PyTorch holds memory in this process and none of it is managed."""
    counters = _core.counters()
    if counters["resident_bytes"] or counters["paused_bytes"]:
        return
    held = _bytes_of_torch(torch)
    if held:
        warn_once(
            "nothing managed",
            "pause: nothing was released, because no GPU memory of this process is managed. PyTorch holds %.0f MiB outside "
            "regions. Allocate what is to be paused inside region(), on the thread that has entered it.",
            held / _MIB,
        )


def _bytes_of_torch(torch: TorchCuda | None) -> int:
    """Return the bytes of PyTorch's segments, or 0 if they are not known."""
    if torch is None:
        return 0
    try:
        return sum(torch.reserved_bytes(device) for device in devices_in_use())
    except (TorchMemorySaverError, RuntimeError) as error:  # a lost device, or a forked child
        logger.debug("what PyTorch holds is not known: %s", error)
        return 0


def warn_of_receivers(shared_bytes: int) -> None:
    """Warn that a pause may not have released memory, because other processes hold it."""
    if shared_bytes:
        warn_once(
            "receivers hold memory",
            "pause: up to %.0f MiB stay on the GPU, because other processes may still hold tensors of this memory that were "
            "sent to them. It is released when they drop these tensors and call torch.cuda.ipc_collect(). Pause with "
            'if_shared="wait" and a timeout to wait for them, or with if_shared="refuse". Each report has the bytes as '
            "possibly_shared_bytes.",
            shared_bytes / _MIB,
        )
