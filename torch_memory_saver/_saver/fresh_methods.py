"""The part of the public class that finds what was forgotten at a wake-up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_memory_saver._saver.first_use import UsedAtFirstCall
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.freshness import FreshReport

if TYPE_CHECKING:
    import torch

    Ignorable: TypeAlias = str | torch.Tensor | torch.nn.Module | Iterable[Any]

__all__ = ["FreshMethods"]


@eager_methods
class FreshMethods(UsedAtFirstCall):
    """check_fresh()."""

    def check_fresh(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        ignore: Ignorable = (),
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        whole: bool = False,
    ) -> FreshReport:
        """What a resumed engine has forgotten to restore: live memory that nothing has written to since its resume. For
        debugging, with :attr:`guard` on since before that resume.

        A resume fills memory that comes back without contents with 0xFF bytes. This looks at the blocks that were live when
        the resume began, in a few places of each, and reports those that still hold the pattern: by tensor, and by where
        they were allocated if PyTorch's history is recorded (:func:`torch_memory_saver.memory.record_history`). Print the
        report for a table. Call it when the engine says that it is awake, before it serves.

        Waits for the devices, as a pause does, and changes nothing. Meanwhile other threads cannot send this memory to other
        processes. Runs no kernel: it copies samples to pinned host memory, some 5 MB for 10 000 blocks.

        A block that was freed and allocated again since the resume, at the same address and with the same size, counts as
        the old one: PyTorch cannot tell them apart.

        Args:
            tags: The tags to look at: a tag or a pattern, several, or None for every tag.
            ignore: What is legitimately not written yet: tags or patterns, such as "kv_cache", tensors (their whole
                storages), modules (their parameters and buffers), or iterables of these. Memory of ignored tags may be
                paused.
            modules: Modules that name what is found. All modules that Python's garbage collector lists do so anyway: pass
                them in a process that has called ``gc.freeze()``.
            whole: Reads the blocks from end to end, in several steps where they are large. Finds what the samples miss.

        Raises:
            InvalidStateError: Guard mode is off; memory of the tags is not resident; or this thread is inside a pause or
                resume.
            CaptureInProgressError: A stream capture is active. Nothing was changed.
            InvalidArgumentError: Neither tags nor an iterable of them; something else in `ignore` or `modules`.
            OutOfHostMemoryError, DriverError: The samples could not be copied. Nothing was changed.
        """
        report: FreshReport = self._use().check_fresh(tags, ignore=ignore, modules=modules, whole=whole)
        return report
