"""TMS_OOM_REPORT_DIR: out-of-memory errors are reported to files without a change of the program."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from torch_memory_saver._out_of_memory import content as content  # imported now, not where memory is short
from torch_memory_saver._out_of_memory import text as text
from torch_memory_saver._out_of_memory.folder import ReportFolder
from torch_memory_saver._out_of_memory.reporter import reporter
from torch_memory_saver._torch import layer

__all__ = ["attach_observer", "start_reports"]

logger = logging.getLogger("torch_memory_saver")

_DIRECTORY = "TMS_OOM_REPORT_DIR"
#: The modules torch whose observer is ours. PyTorch has no way to take one away, and a forked child inherits it.
_observed: list[Any] = []


def start_reports(directory: str) -> None:
    """Has reports written to a folder. PyTorch's own errors are observed as soon as the process uses CUDA, if PyTorch is
    imported by now; otherwise as soon as this package uses it. Initialises nothing."""
    reporter.write_to(ReportFolder(os.path.abspath(directory)))
    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        attach_observer(torch)
        return
    layer.at_first_use(attach_observer)
    call_when_initialized = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if call_when_initialized is not None:
        call_when_initialized(partial(attach_observer, torch))


def attach_observer(torch: Any) -> None:
    """Adds our observer to those of PyTorch, whose CUDA is initialised. Does nothing the second time."""
    if any(torch is observed for observed in _observed):
        return
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    try:
        if attach is None:
            raise RuntimeError(f"PyTorch {torch.__version__} has no observers")
        attach(reporter.observe)
    except RuntimeError as error:  # an allocator in place of PyTorch's own, too
        logger.warning("%s: PyTorch's own out-of-memory errors are not reported: %s", _DIRECTORY, error)
        return
    _observed.append(torch)
