"""PyTorch's observer of its own out-of-memory errors. It is attached at the first use of this package."""

from __future__ import annotations

import logging
from typing import Any

from torch_memory_saver._diagnostics.out_of_memory.reporter import reporter

__all__ = ["attach_observer"]

logger = logging.getLogger("torch_memory_saver")

#: The modules torch whose observer is ours. PyTorch cannot remove an observer, and a forked child inherits it.
_observed: list[Any] = []


def attach_observer(torch: Any) -> None:
    """Add our observer to those of PyTorch, whose CUDA is initialised. Does nothing the second time."""
    if any(torch is observed for observed in _observed):
        return
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    try:
        if attach is None:
            raise RuntimeError(f"PyTorch {torch.__version__} has no observers")
        attach(reporter.observe)
    except RuntimeError as error:  # an allocator in place of PyTorch's own, too
        level = logging.WARNING if reporter.writes_reports else logging.DEBUG
        logger.log(level, "PyTorch's own out-of-memory errors are not reported, because it takes no observer: %s", error)
        return
    _observed.append(torch)
