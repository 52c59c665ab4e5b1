"""The environment variables that the Python code reads, and misspelled settings: unknown variables and attributes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import suggestion

__all__ = [
    "BUILD_VARIABLES",
    "PYTHON_VARIABLES",
    "Variable",
    "known_variables",
    "unknown_variables",
    "warn_of_unknown_variables",
]

logger = logging.getLogger("torch_memory_saver")


class Variable(NamedTuple):
    """An environment variable, as the documentation shows it."""

    name: str
    meaning: str
    allowed: str
    default: str


#: Environment variables that the Python code reads. The variables of the native code are in csrc/base/config.c.
PYTHON_VARIABLES = (
    Variable(
        "TMS_DEBUG",
        "what is recorded from the first use of the package on. `events`: an event file for each process, "
        "`rank<n>-pid<n>.json`, replaced every few seconds in which something happened, and at exit; also, the free memory "
        "of devices is sampled at each pause and resume. `snapshots`: a memory snapshot of each process before each pause, "
        "in a folder for each moment, of which the latest 10 are kept. `history`: PyTorch records what allocates memory, "
        "the latest 100000 events for each device (`memory.record_history()`). `oom`: a text and a JSON file for each "
        "out-of-memory error, `oom-<time>-rank<n>-pid<n>-<n>`, readable by this user only; a process keeps its first report "
        "and its latest 9, the folder the latest 256 of all processes",
        "events, snapshots, history and oom, separated by commas",
        "none",
    ),
    Variable(
        "TMS_DEBUG_DIR",
        "the folder for what `TMS_DEBUG` records. It has a folder for each of `events`, `snapshots` and `oom`, and is made "
        "where it is missing. Use a new one for each run",
        "any path",
        "`torch_memory_saver_debug` in the working directory",
    ),
    Variable(
        "TMS_METRICS_FILE",
        "a file for metrics in the OpenMetrics text format, replaced at each pause and resume. `{pid}` and `{rank}` in it "
        "are replaced; processes that share one file overwrite each other's",
        "any path",
        "none",
    ),
    Variable(
        "TMS_RELEASE_CACHED",
        "releases cached memory with `memory.release_cached()`, from the first use of the package on: before each pause, or "
        "every so many seconds on a daemon thread. Put off while a capture is visible",
        "pause, or a number of seconds above 0",
        "none",
    ),
)

_PREFIX = "TMS_"
#: Variables that setup.py reads.
BUILD_VARIABLES = ("TMS_WERROR", "TMS_PINNED_VERSION", "TMS_SYMBOLS")
#: Prefixes of the other variables that the core does not read: those of the simulated GPU, the tests and the demo.
_OTHER_PREFIXES = ("TMS_SIMULATED_", "TMS_GPU_", "TMS_DEMO_")


def known_variables() -> set[str]:
    """The names of all variables, except those of the simulated GPU, the tests and the build."""
    return set(_core.SETTINGS) | {variable.name for variable in PYTHON_VARIABLES}


def unknown_variables(names: Iterable[str]) -> list[str]:
    """The names that look like variables of this package but are unknown."""
    known = known_variables().union(BUILD_VARIABLES)
    return sorted(
        name for name in names if name.startswith(_PREFIX) and name not in known and not name.startswith(_OTHER_PREFIXES)
    )


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warns once in a process, at its first use of the package. A process that only inherits variables is not warned."""
    for name in unknown_variables(os.environ):
        logger.warning(
            "the environment variable %s has no effect: it is unknown%s", name, suggestion(name, known_variables())
        )
