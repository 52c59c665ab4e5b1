"""Observers, without which the saver works. The table in ``_additions.py`` says what each folder adds."""

import importlib
from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name):
        """Load a folder that users import when it is first used."""
        if name not in ("events", "memory"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
