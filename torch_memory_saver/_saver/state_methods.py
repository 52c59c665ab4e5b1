"""The part of the public class that shows what is managed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch_memory_saver._saver.arguments import check_device
from torch_memory_saver._saver.first_use import UsedAtFirstCall
from torch_memory_saver._saver.patterns import select_tags
from torch_memory_saver._saver.paused import is_paused, tag_of
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.holders import Ledger
from torch_memory_saver.usage import Stats

if TYPE_CHECKING:
    import torch

__all__ = ["StateMethods"]


@eager_methods
class StateMethods(UsedAtFirstCall):
    """stats(), snapshot(), ledger(), reset_peaks(), is_paused() and tag_of()."""

    def stats(self, tag: str | Iterable[str] | None = None, device: int | torch.device | None = None) -> Stats:
        """The use of managed memory now: bytes by tag and by device, peaks, pauses and resumes so far, every allocation,
        and the counters. ``print(stats())`` shows a table.

        May be called at any time, also while another thread pauses or resumes: then those allocations are "pausing" or
        "resuming". Takes a short lock, waits for no device and makes no driver call. Once a pool is retired it also reads
        PyTorch's list of segments, for ``stranded_bytes``.

        Args:
            tag: Only the allocations of a tag, of several, or of those that match patterns. None: of every tag.
            device: Only those on a device, a CUDA ordinal. None: on every device.

        Raises:
            InvalidArgumentError: Neither a tag nor an iterable of tags; not a device.
        """
        ordinal = None if device is None else check_device(device)
        stats: Stats = self._use().stats(select_tags(tag), ordinal)
        return stats

    def snapshot(self) -> dict[str, Any]:
        """What is managed now as plain data, for ``json.dumps()``: a dict with

        - ``format``, ``pid`` and ``time`` (seconds since 1970);
        - ``segments``, a list with a dict for each allocation: the fields of :class:`Allocation`;
        - ``total``, ``tags``, ``devices``, ``pauses``, ``resumes`` and ``counters``: the fields of :class:`Stats`.
        """
        snapshot: dict[str, Any] = self._use().snapshot()
        return snapshot

    def ledger(self, device: int | torch.device | None = None, *, measure_context: bool = False) -> Ledger:
        """Who holds the memory of the devices now: managed memory, PyTorch's other memory, other libraries, the context,
        other processes, and what is not attributed. The lines add up to what the driver says. ``print(ledger())`` shows
        tables.

        May be called at any time, also in a report of a lack of memory, during a capture, and while another thread pauses or
        resumes. Without `measure_context` it allocates nothing on a device, waits for none and starts no process.

        Args:
            device: A CUDA ordinal. None: every device on which this process has a context.
            measure_context: Where NVML does not tell how much memory this process holds, measure what a context takes in a
                child process.

        Raises:
            InvalidArgumentError: Not a device.
            InvalidStateError: This process has no context on the device.
            DriverError: The driver fails, or the child process cannot make a context.
        """
        ordinal = None if device is None else check_device(device)
        ledger: Ledger = self._use().ledger(ordinal, measure_context)
        return ledger

    def reset_peaks(self) -> None:
        """Each ``resident_peak_bytes`` becomes what is mapped now."""
        self._use().reset_peaks()

    def is_paused(self, x: torch.Tensor) -> bool:
        """Whether access to a tensor would be an error now, because its storage lies in managed memory that is not resident.

        Such memory is paused, being paused or resumed, or damaged (see :meth:`pause`). A copy from or to it fails with
        "invalid argument". A kernel that accesses it causes an illegal memory access, after which the process cannot use the
        device any more. Works for any device and any view. Tensors in other memory, for instance on the CPU, are never
        paused. A tensor made of others (``DTensor``) is paused if any of them is.

        Raises:
            InvalidArgumentError: Not a tensor, or one without a storage of its own, such as a sparse one: pass its parts.
        """
        return is_paused(x)

    def tag_of(self, x: torch.Tensor) -> str | None:
        """The tag of the memory that a tensor lies in, paused or not. None for memory that is not managed, such as a CPU
        tensor's. Of a tensor made of others (a subclass): that of the first one that has a tag.

        Raises:
            InvalidArgumentError: As for :meth:`is_paused`.
        """
        return tag_of(x)
