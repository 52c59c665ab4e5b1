"""Warn once for each tag of memory that PyTorch allocates outside every region while a region of the tag is open, because
no pause releases that memory.

A region applies to the thread that enters it and to the calls that follow it. Tensors of other threads, the program's own
pools and graphs captured without cuda_graph() are ordinary memory, and nothing else warns the user. The memory that PyTorch
holds is compared with the managed memory, so allocations from PyTorch's cache are not detected. A comparison takes about
ten microseconds, so only the first, second, fourth, eighth, ... region of a tag is checked.

A program can turn off PyTorch's caching. Then PyTorch uses no pool, and without the preload library nothing is managed.

Other threads may allocate and free managed memory at the same time. A reading is valid only if no counter changed during it.
A free of managed memory while the region was open prevents the comparison: PyTorch may have freed that memory before (a
deferred free), or may never have held it.

There is no lock: lost counts of concurrent entries do not matter.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.layer import TorchCuda, devices_in_use
from torch_memory_saver._torch.records.frames import Frame, Reading
from torch_memory_saver._torch.records.pool import Pool
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["OutsideMemoryMonitor"]

logger = logging.getLogger("torch_memory_saver")

#: No warning up to this size: that of torch's smallest segment, for instance for the random generator's state.
_SMALL_BYTES = 2 << 20
#: Regions of at most this number of tags are counted.
_MAX_TAGS = 1000
#: The maximum number of attempts at a consistent reading.
_ATTEMPTS = 3
_MIB = 1 << 20
#: A part of the warning for transformers, which loads weights on threads.
_WAY_OUT_OF_TRANSFORMERS = ", or set HF_DEACTIVATE_ASYNC_LOAD=1, with which transformers loads on the calling thread"
#: The native core's counters that PyTorch's memory is compared with.
_COMPARED = ("allocations_total", "frees_total", "resident_bytes", "paused_bytes")


def _take_reading(torch: TorchCuda, disabled: int) -> Reading | None:
    """Return a reading, or None if other threads change the numbers during every attempt."""
    for _ in range(_ATTEMPTS):
        before = _managed()
        # This waits for a running call of PyTorch's allocator on the device, so that both sides count its allocation.
        reserved = sum(torch.reserved_bytes(device) for device in devices_in_use())
        if _managed() == before:
            allocations, frees, resident, paused = before
            return Reading(reserved - resident - paused, allocations, frees, disabled)
    return None


def _managed() -> tuple[int, ...]:
    counters = _core.counters()
    return tuple(counters[name] for name in _COMPARED)


class OutsideMemoryMonitor:
    """The monitor of this process: its counts of entries and the warnings that it has given."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}
        self._warned: set[str] = set()
        self._reported: set[str] = set()
        self._warned_uncached: set[str] = set()  # what has been warned of because PyTorch does not cache
        self._disabled = 0  # entries of disable() and the like, inside which memory is ordinary on purpose

    def begin(self, torch: TorchCuda, frame: Frame) -> Reading | None:
        """Return a reading for a comparison at the exit, or None if there is no comparison. To be called at the entry of a
        region or of disable()."""
        if not frame.managed:
            self.note_ordinary()
            return None
        if frame.origin is not None:
            return None
        if not torch.caches and not _core.preloaded:
            self._warn_of_uncached(
                "region",
                f"{frame} manages nothing, and no pause releases what is allocated in it. Turn caching on, or start the "
                'process with the preload library (hook mode "preload"), which manages cudaMalloc',
            )
        entries = self._entries.get(frame.tag, 0) + 1
        if entries == 1 and len(self._entries) >= _MAX_TAGS:
            return None
        self._entries[frame.tag] = entries
        if entries & (entries - 1) or frame.tag in self._warned:
            return None
        return _take_reading(torch, self._disabled)

    def note_ordinary(self) -> None:
        """Note that memory is about to be allocated that is ordinary on purpose, so that open regions do not warn."""
        self._disabled += 1

    def begin_capture(self, torch: TorchCuda) -> None:
        """Warn if PyTorch does not cache. To be called before cuda_graph() begins a capture."""
        if not torch.caches:
            self._warn_of_uncached(
                "capture",
                "a capture fails as soon as it allocates memory, with torch.cuda.graph() as well. Turn caching on",
            )

    def _warn_of_uncached(self, cause: str, consequence: str) -> None:
        if cause not in self._warned_uncached:
            self._warned_uncached.add(cause)
            logger.warning(
                "PyTorch calls cudaMalloc for each allocation, because its caching is off "
                "(PYTORCH_NO_CUDA_MEMORY_CACHING, or caching_allocator_enable(False)): %s. (Logged once.)",
                consequence,
            )

    def end(self, frame: Frame, pools: Sequence[Pool]) -> None:
        """Warn if PyTorch took unmanaged memory while a region was open. To be called after the exit of the region without
        an exception. `pools` are the pools that it had."""
        before, torch = frame.reading, frame.torch
        if before is None or torch is None:
            return
        try:
            after = _take_reading(torch, self._disabled)
        except (TorchMemorySaverError, RuntimeError) as error:  # a lost device, or a forked child
            logger.debug("%s: the memory that PyTorch allocated inside is not known: %s", frame, error)
            return
        if after is None or (after.disabled, after.frees) != (before.disabled, before.frees):
            return
        grown = after.unmanaged_bytes - before.unmanaged_bytes
        if grown > _SMALL_BYTES:
            self._warned.add(frame.tag)
            logger.warning(
                "while %s was open PyTorch took %.0f MiB of GPU memory that no region manages and no pause releases. "
                "Another thread took it, whose work was not submitted to a ThreadPoolExecutor inside the region, or a pool "
                "of the program's own, or a graph captured without cuda_graph(). Have the thread call "
                "torch_memory_saver.bind_region(function) in place of the function, or load a model outside of the region "
                "and call torch_memory_saver.manage(model) after it%s. (Logged once per tag.)",
                frame,
                grown / _MIB,
                _WAY_OUT_OF_TRANSFORMERS if "transformers" in sys.modules else "",
            )
        elif after.allocations == before.allocations and logger.isEnabledFor(logging.INFO):
            self._report_if_empty(torch, frame, pools)

    def _report_if_empty(self, torch: TorchCuda, frame: Frame, pools: Sequence[Pool]) -> None:
        if frame.tag in self._reported:
            return
        if any(segment["allocated_size"] for pool in pools for segment in torch.segments(pool.id)):
            return
        self._reported.add(frame.tag)
        logger.info("%s managed nothing: PyTorch allocated no memory in it. (Logged once per tag.)", frame)
