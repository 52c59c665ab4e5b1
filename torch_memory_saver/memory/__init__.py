"""Finding memory that grows: what PyTorch allocated where, snapshots of it over time, and what changed between them. Giving
cached memory back.

Importing this package imports neither torch nor matplotlib. What a function needs is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_memory_saver._services import History, record_history, stop_history
    from torch_memory_saver._stacks import CallStack, Frame, Origin

    from .comparison import Comparison, DeviceUsage, Drift, Fragmentation, GrowthKind, Holder, Process, StackGrowth, compare
    from .loading import load_snapshot
    from .log import MemoryLog
    from .log_plot import plot_memory_log
    from .log_row import MemoryRow, read_memory_log
    from .logged_calls import log_memory
    from .model import Block, BlockState, Event, ManagedSegment, Segment, Snapshot
    from .release import release_cached, releasing_cached
    from .release_report import DeviceRelease, ReleaseReport
    from .sampler import MemorySnapshotSampler
    from .snapshots import take_snapshot, write_snapshot

__all__ = [
    "Block",
    "BlockState",
    "CallStack",
    "Comparison",
    "DeviceRelease",
    "DeviceUsage",
    "Drift",
    "Event",
    "Fragmentation",
    "Frame",
    "GrowthKind",
    "History",
    "Holder",
    "ManagedSegment",
    "MemoryLog",
    "MemoryRow",
    "MemorySnapshotSampler",
    "Origin",
    "Process",
    "ReleaseReport",
    "Segment",
    "Snapshot",
    "StackGrowth",
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
    "Block": ".model",
    "BlockState": ".model",
    "CallStack": "torch_memory_saver._stacks",
    "Comparison": ".comparison",
    "DeviceRelease": ".release_report",
    "DeviceUsage": ".comparison",
    "Drift": ".comparison",
    "Event": ".model",
    "Fragmentation": ".comparison",
    "Frame": "torch_memory_saver._stacks",
    "GrowthKind": ".comparison",
    "History": "torch_memory_saver._services",
    "Holder": ".comparison",
    "ManagedSegment": ".model",
    "MemoryLog": ".log",
    "MemoryRow": ".log_row",
    "MemorySnapshotSampler": ".sampler",
    "Origin": "torch_memory_saver._stacks",
    "Process": ".comparison",
    "ReleaseReport": ".release_report",
    "Segment": ".model",
    "Snapshot": ".model",
    "StackGrowth": ".comparison",
    "compare": ".comparison",
    "load_snapshot": ".loading",
    "log_memory": ".logged_calls",
    "plot_memory_log": ".log_plot",
    "read_memory_log": ".log_row",
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
