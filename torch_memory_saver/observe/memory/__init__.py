"""Tools that find growing memory, and functions that release cached memory.

The tools record the allocations of PyTorch, log the memory of processes, take snapshots over time, and compare snapshots.

Importing this package imports neither torch nor matplotlib. The modules that a function needs are imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_memory_saver._services import History, record_history, stop_history

    from .comparison import Comparison, compare
    from .log import MemoryLog, MemoryRow, log_memory, read_memory_log
    from .log_plot import plot_memory_log
    from .model import Snapshot
    from .release import ReleaseReport, release_cached, releasing_cached
    from .sampler import MemorySnapshotSampler
    from .snapshot_reader import load_snapshot
    from .snapshots import take_snapshot, write_snapshot

__all__ = [
    "Comparison",
    "History",
    "MemoryLog",
    "MemoryRow",
    "MemorySnapshotSampler",
    "ReleaseReport",
    "Snapshot",
    "compare",
    "load_snapshot",
    "log_memory",
    "plot_memory_log",
    "read_memory_log",
    "record_history",
    "release_cached",
    "releasing_cached",
    "stop_history",
    "take_snapshot",
    "write_snapshot",
]

#: The module of each public name.
_MODULES = {
    "Comparison": ".comparison",
    "History": "torch_memory_saver._services",
    "MemoryLog": ".log",
    "MemoryRow": ".log",
    "MemorySnapshotSampler": ".sampler",
    "ReleaseReport": ".release",
    "Snapshot": ".model",
    "compare": ".comparison",
    "load_snapshot": ".snapshot_reader",
    "log_memory": ".log",
    "plot_memory_log": ".log_plot",
    "read_memory_log": ".log",
    "record_history": "torch_memory_saver._services",
    "release_cached": ".release",
    "releasing_cached": ".release",
    "stop_history": "torch_memory_saver._services",
    "take_snapshot": ".snapshots",
    "write_snapshot": ".snapshots",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
