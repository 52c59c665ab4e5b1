"""Python's garbage collector during captures, and while a pause reads PyTorch's blocks.

The collector may destroy a CUDA graph that is part of a reference cycle. During a capture the driver refuses that, and
invalidates the capture (cudaGraphExecDestroy: "operation not permitted when stream is capturing"). So the collector does not
run during captures.

PyTorch describes each block by a dict. Thousands of them would start collections, which find nothing and cost more than the
reading.

The collector stays enabled: a program that calls ``gc.disable()``, ``gc.enable()`` or ``gc.isenabled()``, on any
thread, gets and keeps what it asks for. Only the number of new objects that start a collection is raised. A forked child
gets the old number back.
"""

from __future__ import annotations

import gc
import os
import threading

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import SingleUseScope

__all__ = ["StoppedCollector"]

#: A number of new objects that is never reached. No program has set it.
_NEVER = 2_147_483_629


class _Collector:
    """The collector of this process, and the uses during which it does not run by itself."""

    def __init__(self) -> None:
        self._uses: list[StoppedCollector] = []
        self._thresholds = gc.get_threshold()
        self._lock = threading.RLock()

    def stop(self, use: StoppedCollector) -> None:
        _core.within(self._lock, self._stop, use)

    def start(self, use: StoppedCollector) -> None:
        _core.within(self._lock, self._start, use)

    def _stop(self, use: StoppedCollector) -> None:
        self._uses.append(use)
        thresholds = gc.get_threshold()
        if thresholds[0] != _NEVER:
            self._thresholds = thresholds
            gc.set_threshold(_NEVER, *thresholds[1:])

    def _start(self, use: StoppedCollector) -> None:
        if use in self._uses:
            self._uses.remove(use)
        if not self._uses and gc.get_threshold()[0] == _NEVER:  # else the program has set another number
            gc.set_threshold(*self._thresholds)

    def after_fork_in_child(self) -> None:
        """End the uses of the parent's other threads, which do not exist here."""
        self._lock = threading.RLock()
        for use in list(self._uses):
            if use.thread != threading.get_ident():
                self._start(use)


_collector = _Collector()
os.register_at_fork(after_in_child=_collector.after_fork_in_child)


class StoppedCollector(SingleUseScope):
    """A context manager inside which the collector does not run by itself. Uses of several threads overlap, and may nest:
    after the last one the collector runs as before."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def _begin(self) -> None:
        _collector.stop(self)

    def _end(self) -> None:
        _collector.start(self)
