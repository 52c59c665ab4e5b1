"""The part of the public class that returns slack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch_memory_saver._saver.first_use import UsedAtFirstCall, given
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.report import CompactReport

__all__ = ["CompactMethods"]


@eager_methods
class CompactMethods(UsedAtFirstCall):
    """compact()."""

    def compact(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        live_only: bool = True,
        progress: Callable[[int, int], Any] | None = None,
        if_shared: Literal["allow", "wait", "refuse"] = "allow",
        timeout: float | None = None,
    ) -> CompactReport:
        """Returns *slack* to the driver: memory of freed allocations that share a physical handle with others.

        A resume backs neighbouring allocations of a tag by one large handle, because that is faster. If one of them is freed
        afterwards, its memory stays with the handle, for later allocations of the tag, until the next pause. ``slack_bytes``
        of :meth:`stats` counts it. This returns it earlier. The allocations that share a handle with slack are copied to
        pinned host memory, paused, and resumed with their contents. Addresses stay. Allocations without slack beside them
        are not touched, and without slack the call does nothing.

        The contract is that of :meth:`pause`: nothing may use the memory of the tags during the call, neither work of the
        GPU that another thread launches nor a transfer by another device or process. The call waits for work that was
        launched before. Nothing is compacted without a call. What registers physical memory (RDMA, NCCL's user buffers)
        must register it again: hooks of :meth:`on_pause` and :meth:`on_resume` are called around a compaction that finds
        slack of their tags, with ``call.operation`` "compact". All of them see resident memory.

        Segments of PyTorch's cache without a tensor are released before, as before a pause. May be called from any thread;
        regions of the same tags that other threads want to enter wait for its end. Host memory for the copies is needed for
        the time of the call.

        Args:
            tag: A tag, several, or None for every tag; patterns as for :meth:`pause`. Paused memory is skipped.
            live_only: False copies the free blocks of PyTorch's segments as well.
            progress: Called on this thread with (bytes done, total bytes), as by :meth:`pause`: first for the copies to host
                memory, then for those back. It must not call pause, resume or compact.
            if_shared: What to do if other processes may still use tensors of tags with slack that were sent to them, as for
                :meth:`pause`. With "allow" they may be left with a copy of their own, which no longer changes with this
                process's: send the tensors again.
            timeout: Seconds, for ``if_shared="wait"`` only.

        Returns:
            A report, whose ``bytes`` are the slack that was returned.

        Raises:
            InvalidArgumentError, InvalidStateError, CaptureInProgressError: As for :meth:`pause`. Nothing was changed.
            OutOfHostMemoryError: There is too little host memory for the copies. Nothing was changed.
            OutOfMemoryError: Another process has taken the memory meanwhile. The allocations stay paused, with their
                contents: make room, and call :meth:`resume`.
            DriverError: As for :meth:`pause` and :meth:`resume`. What is paused then has its contents: call :meth:`resume`.
            Exception: Raised by ``progress`` or a hook. Nothing was changed, unless memory was already being released: then
                the compaction is complete.
        """
        optional = given(
            live_only=(live_only, True),
            progress=(progress, None),
            if_shared=(if_shared, "allow"),
            timeout=(timeout, None),
        )
        report: CompactReport = self._use().compact(tag=tag, **optional)
        return report
