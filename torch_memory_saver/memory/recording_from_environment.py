"""The recordings `history` and `snapshots` of TMS_DEBUG: a program's memory is recorded without a change of it.

Nothing here initialises CUDA: a process that does not use it has nothing to record.
"""

from __future__ import annotations

import logging
from typing import Any

from torch_memory_saver._services import before_pause, layer, record_history
from torch_memory_saver.errors import TorchMemorySaverError

from .sampler import MemorySnapshotSampler

__all__ = ["start_history", "start_snapshots"]

logger = logging.getLogger("torch_memory_saver")

_HISTORY, _SNAPSHOTS = "TMS_DEBUG=history", "TMS_DEBUG=snapshots"


def start_history(_folder: str) -> None:
    """Begin to record as soon as the package uses CUDA in this process; at once, if the process uses it already. The history
    needs no folder: snapshots and out-of-memory reports contain it."""

    def start(_torch: Any) -> None:
        try:
            logger.info("%s: %s", _HISTORY, record_history())
        except TorchMemorySaverError as error:
            logger.warning("%s has no effect: %s", _HISTORY, error)

    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        start(torch)
    else:
        layer.at_first_use(start)


def start_snapshots(folder: str) -> None:
    """Have a snapshot written to a folder before each pause. A forked child that can use CUDA goes on with them."""
    sampler = MemorySnapshotSampler(folder, on_error="count")

    def write() -> None:
        torch = layer.imported()
        # False in a forked child that cannot use its parent's CUDA, too.
        if torch is None or not torch.cuda.is_initialized():
            return
        path = sampler.sample()
        if path is not None:
            logger.info("%s: wrote %s, %d bytes", _SNAPSHOTS, path, path.stat().st_size)

    before_pause.add(_SNAPSHOTS, write)
