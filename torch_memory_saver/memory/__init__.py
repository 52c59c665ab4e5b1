"""Finding memory that grows: what PyTorch allocated where, snapshots of it over time, and what changed between them. Giving
cached memory back.

Importing this package imports neither torch nor matplotlib. What a function needs is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .release import release_cached, releasing_cached
    from .release_report import DeviceRelease, ReleaseReport

__all__ = [
    "DeviceRelease",
    "ReleaseReport",
    "release_cached",
    "releasing_cached",
]

#: The module of each public name.
_MODULES = {
    "DeviceRelease": "release_report",
    "ReleaseReport": "release_report",
    "release_cached": "release",
    "releasing_cached": "release",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
