"""Misspelled settings: unknown environment variables and attributes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable

from torch_memory_saver import _core

__all__ = ["suggestion", "unknown_variables", "warn_of_unknown_variables"]

logger = logging.getLogger("torch_memory_saver")

_PREFIX = "TMS_"
#: Known variables that the core does not read: those of the simulated GPU, the tests, the demo and the build.
_OTHER_PREFIXES = ("TMS_SIMULATED_", "TMS_GPU_", "TMS_DEMO_")
_OTHERS = ("TMS_WERROR",)


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" with the known name most similar to `name`; "" if there is none."""
    import difflib

    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def unknown_variables(names: Iterable[str]) -> list[str]:
    """The names that look like variables of this package but are unknown."""
    return sorted(
        name
        for name in names
        if name.startswith(_PREFIX)
        and name not in _core.SETTINGS
        and name not in _OTHERS
        and not name.startswith(_OTHER_PREFIXES)
    )


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warns once in a process, at its first use of the package. A process that only inherits variables is not warned."""
    for name in unknown_variables(os.environ):
        logger.warning("the environment variable %s has no effect: it is unknown%s", name, suggestion(name, _core.SETTINGS))
