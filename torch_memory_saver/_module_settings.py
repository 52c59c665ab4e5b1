"""The saver's settings as attributes of the module: ``torch_memory_saver.guard = True`` sets the object's.

Methods of the object are functions of the module, so its settings are expected there as well. An assignment to an ordinary
module would create an attribute that nothing reads. Names that are no setting behave as in any module.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch_memory_saver._saver.first_use import UsedAtFirstCall

__all__ = ["forward_settings"]


def forward_settings(module: ModuleType, saver: UsedAtFirstCall) -> None:
    """Give a module a property for each setting of the saver."""
    names = [name for name, value in vars(UsedAtFirstCall).items() if isinstance(value, property)]
    properties = {name: _forwarded(saver, name) for name in names}
    module.__class__ = type("_ModuleWithSettings", (type(module),), {"__doc__": module.__doc__, **properties})


def _forwarded(saver: UsedAtFirstCall, name: str) -> property:
    """Return the property of a module for one setting. Setting a read-only one is the error of the saver's own property."""

    def read(module: ModuleType) -> Any:
        return getattr(saver, name)

    def write(module: ModuleType, value: Any) -> None:
        setattr(saver, name, value)

    return property(read, write, doc=getattr(UsedAtFirstCall, name).__doc__)
