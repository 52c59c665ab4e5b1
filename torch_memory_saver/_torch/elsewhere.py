"""Memory that PyTorch takes outside of every region while one is open: one warning a tag, because no pause releases it.

A region applies to the thread that enters it. Tensors that a thread pool makes, the program's own pools and graphs captured
without cuda_graph() are ordinary memory, and nothing else warns the user. What PyTorch has from the driver is compared with
what is managed of it, so that what PyTorch serves from its cache is not noticed. That takes some ten microseconds: of the
regions of a tag the first, second, fourth, eighth and so on are looked at.

Other threads allocate and free managed memory at the same time. A reading counts only if no counter changed while it was
taken. Managed memory that was freed while the region was open prevents the comparison: PyTorch may have freed it before, if
that was deferred, or may never have had it.

No lock: counts that are lost when threads enter at once do not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import TorchCuda, devices_in_use
from torch_memory_saver.errors import TorchMemorySaverError

if TYPE_CHECKING:
    from torch_memory_saver._torch.pools import Pool

__all__ = ["Reading", "Watch"]

logger = logging.getLogger("torch_memory_saver")

#: Bytes too few for a warning: torch's smallest segment, which holds the random generator's state, for instance.
_SMALL_BYTES = 2 << 20
#: Of so many tags the regions are counted.
_MOST_TAGS = 1000
#: How often a reading is taken until nothing changes during it.
_ATTEMPTS = 3
_MIB = 1 << 20
#: The native core's counters of what PyTorch's memory is compared with.
_COMPARED = ("allocations_total", "frees_total", "resident_bytes", "paused_bytes")


class Reading(NamedTuple):
    """What PyTorch and this package had when a region was entered or left.

    Attributes:
        unmanaged_bytes: Device memory that PyTorch had and this package did not manage.
        allocations, frees: Managed ones since the process began.
        disabled: Entries of disable() since then.
    """

    unmanaged_bytes: int
    allocations: int
    frees: int
    disabled: int


def _take_reading(torch: TorchCuda, disabled: int) -> Reading | None:
    """None where other threads change the numbers each time they are read."""
    for _ in range(_ATTEMPTS):
        before = _managed()
        # This waits for a call of PyTorch's allocator under way on the device: then both sides count what it allocates.
        reserved = sum(torch.reserved_bytes(device) for device in devices_in_use())
        if _managed() == before:
            allocations, frees, resident, paused = before
            return Reading(reserved - resident - paused, allocations, frees, disabled)
    return None


def _managed() -> tuple[int, ...]:
    counters = _core.counters()
    return tuple(counters[name] for name in _COMPARED)


class Watch:
    """What was counted and warned of in this process."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}
        self._warned: set[str] = set()
        self._told: set[str] = set()
        self._disabled = 0  # entries of disable(), inside which memory is meant to be ordinary

    def begin(self, torch: TorchCuda, frame: Frame) -> Reading | None:
        """At the entry of a region or of disable(). None: nothing is compared at its exit."""
        if not frame.managed:
            self._disabled += 1
            return None
        entries = self._entries.get(frame.tag, 0) + 1
        if entries == 1 and len(self._entries) >= _MOST_TAGS:
            return None
        self._entries[frame.tag] = entries
        if entries & (entries - 1) or frame.tag in self._warned:
            return None
        return _take_reading(torch, self._disabled)

    def end(self, frame: Frame, pools: Sequence[Pool]) -> None:
        """After the exit of a region without an exception; `pools` were its own."""
        before, torch = frame.reading, frame.torch
        if before is None or torch is None:
            return
        try:
            after = _take_reading(torch, self._disabled)
        except (TorchMemorySaverError, RuntimeError) as error:  # A device is lost, or this is a forked child.
            logger.debug("%s: what PyTorch took inside is not known: %s", frame, error)
            return
        if after is None or (after.disabled, after.frees) != (before.disabled, before.frees):
            return
        grown = after.unmanaged_bytes - before.unmanaged_bytes
        if grown > _SMALL_BYTES:
            self._warned.add(frame.tag)
            logger.warning(
                "while %s was open PyTorch took %d bytes (%.0f MiB) of GPU memory that no region manages and no pause gives "
                "back: on another thread, such as a thread pool's (a region is about the thread that enters it), in a pool "
                "of the program's own, or in a graph captured without cuda_graph(). (Said once for the tag.)",
                frame,
                grown,
                grown / _MIB,
            )
        elif after.allocations == before.allocations and logger.isEnabledFor(logging.INFO):
            self._tell_if_empty(torch, frame, pools)

    def _tell_if_empty(self, torch: TorchCuda, frame: Frame, pools: Sequence[Pool]) -> None:
        if frame.tag in self._told:
            return
        if any(segment["allocated_size"] for pool in pools for segment in torch.segments(pool.id)):
            return
        self._told.add(frame.tag)
        logger.info("%s managed nothing: PyTorch allocated no memory in it. (Said once for the tag.)", frame)
