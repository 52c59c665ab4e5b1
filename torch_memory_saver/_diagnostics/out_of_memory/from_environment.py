"""The recording `oom` of TMS_DEBUG: out-of-memory errors are reported to files without a change of the program."""

from __future__ import annotations

import os
from functools import partial

from torch_memory_saver._diagnostics.out_of_memory import content as content  # imported now, not where memory is short
from torch_memory_saver._diagnostics.out_of_memory import text as text
from torch_memory_saver._diagnostics.out_of_memory.folder import ReportFolder
from torch_memory_saver._diagnostics.out_of_memory.observer import attach_observer
from torch_memory_saver._diagnostics.out_of_memory.reporter import reporter
from torch_memory_saver._torch import layer

__all__ = ["start_reports"]


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
