"""Python's garbage collector during captures, and while a pause reads PyTorch's blocks.

The collector may destroy a CUDA graph that is part of a reference cycle. During a capture the driver refuses that, and
invalidates the capture (cudaGraphExecDestroy: "operation not permitted when stream is capturing"). So it does not run then.

PyTorch describes each block by a dict. Thousands of them would start collections, which find nothing and cost more than the
reading.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType

__all__ = ["collector_stopped"]


class _CollectorStopped:
    """Inside, the collector does not run by itself. Uses of several threads overlap, and may nest: the last one to end
    starts the collector again, if it ran before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_enabled:
                gc.enable()


#: For the process, as the collector is.
collector_stopped = _CollectorStopped()
