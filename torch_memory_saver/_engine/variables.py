"""The environment variables that the Python code reads, and misspelled settings: unknown variables and attributes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import suggestion

__all__ = ["PYTHON_VARIABLES", "Variable", "known_variables", "unknown_variables", "warn_of_unknown_variables"]

logger = logging.getLogger("torch_memory_saver")


class Variable(NamedTuple):
    """An environment variable, as the documentation shows it."""

    name: str
    meaning: str
    allowed: str
    default: str


#: Those that the Python code reads. Those of the native code are in csrc/base/config.c.
PYTHON_VARIABLES = (
    Variable(
        "TMS_MEMORY_HISTORY",
        "has PyTorch record what allocates memory, with `memory.record_history()`, from the first use of the package on: so "
        "many events for each device",
        "a number of at least 1",
        "none",
    ),
    Variable(
        "TMS_SNAPSHOT_DIR",
        "a folder for memory snapshots, which are written from the first use of the package on: one folder for each moment, "
        "with a file of every process; the latest 10 moments are kept. Use a new one for each run",
        "any path",
        "none",
    ),
    Variable(
        "TMS_SNAPSHOT_EVERY",
        "when they are written: before each so many calls of `pause()`, or every so many seconds on a daemon thread",
        "a number of pauses, such as 10, or of seconds, such as 30s",
        "`1`",
    ),
    Variable(
        "TMS_SNAPSHOT_ROLE",
        "what the process is, in the names of the files and in the snapshots, such as `scheduler`",
        "any text",
        "the title that the process has given itself, else its program",
    ),
    Variable(
        "TMS_EVENTS_DIR",
        "a folder for event files, which are written from the first use of the package on: one for each process, "
        "`rank<n>-pid<n>.json`, replaced every few seconds in which something happened, and at exit. Also records the free "
        "memory of devices at each pause and resume",
        "any path",
        "none",
    ),
    Variable(
        "TMS_METRICS_FILE",
        "a file for metrics in the OpenMetrics text format, replaced at each pause and resume. `{pid}` and `{rank}` in it "
        "are replaced; processes that share one file overwrite each other's",
        "any path",
        "none",
    ),
    Variable(
        "TMS_OOM_REPORT_DIR",
        "a folder for out-of-memory reports, which are written from the first use of the package on: a text and a JSON file "
        "for each error, `oom-<time>-rank<n>-pid<n>-<n>`, readable by this user only. A process keeps its first report and "
        "its latest 9, the folder the latest 256 of all processes",
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
#: Known variables that the core does not read: those of the simulated GPU, the tests, the demo and the build.
_OTHER_PREFIXES = ("TMS_SIMULATED_", "TMS_GPU_", "TMS_DEMO_")
_OTHERS = ("TMS_WERROR",)


def known_variables() -> set[str]:
    """The names of all variables, except those of the simulated GPU, the tests and the build."""
    return set(_core.SETTINGS) | {variable.name for variable in PYTHON_VARIABLES}


def unknown_variables(names: Iterable[str]) -> list[str]:
    """The names that look like variables of this package but are unknown."""
    known = known_variables()
    return sorted(
        name
        for name in names
        if name.startswith(_PREFIX) and name not in known and name not in _OTHERS and not name.startswith(_OTHER_PREFIXES)
    )


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warns once in a process, at its first use of the package. A process that only inherits variables is not warned."""
    for name in unknown_variables(os.environ):
        logger.warning(
            "the environment variable %s has no effect: it is unknown%s", name, suggestion(name, known_variables())
        )
