"""The environment variables that the Python code reads, and misspelled settings: unknown variables and attributes.

In secure-execution mode (csrc/base/config.h) every variable counts as unset. Python itself still follows PYTHONPATH there,
so a program with raised privileges must be started with ``python -I``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import suggestion
from torch_memory_saver.errors import DriverUnavailableError

__all__ = [
    "BUILD_VARIABLES",
    "PYTHON_VARIABLES",
    "Variable",
    "driver_library",
    "init_enabled",
    "known_variables",
    "path_at_import",
    "setting",
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
        "in a folder for each moment, of which the latest 20 are kept, and 10 for each selection of tags that a process "
        "pauses, at most 50. `history`: PyTorch records what allocates memory, "
        "the latest 100000 events for each device (`memory.record_history()`). `oom`: a text and a JSON file for each "
        "out-of-memory error, `oom-<time>-rank<n>-pid<n>-<n>`, readable by this user only; a process keeps its first report "
        "and its latest 9, the folder the latest 256 of all processes",
        "events, snapshots, history and oom, separated by commas",
        "none",
    ),
    Variable(
        "TMS_DEBUG_DIR",
        "the folder for what `TMS_DEBUG` records. It has a folder for each of `events`, `snapshots` and `oom`, and is made "
        "where it is missing, for this user alone. In a folder that all users share, such as `/tmp`, "
        "`torch_memory_saver-<uid>` is used. Use a new one for each run",
        "any path; a relative one starts in the directory where the package is imported",
        "`torch_memory_saver_debug`",
    ),
    Variable(
        "TMS_METRICS_FILE",
        "a file for metrics in the OpenMetrics text format, replaced at each pause and resume. `{pid}` and `{rank}` in it "
        "are replaced; processes that share one file overwrite each other's. Other users can read it, as far as the umask "
        "allows",
        "any path; a relative one starts in the directory where the package is imported",
        "none",
    ),
    Variable(
        "TMS_RELEASE_CACHED",
        "calls `memory.release_cached()` in a program that is not changed, from the first use of the package on: before "
        "each pause, or every so many seconds on a daemon thread. Put off while a capture is visible",
        "pause, or a number of seconds above 0",
        "none",
    ),
)

_PREFIX = "TMS_"
_DRIVER = "TMS_CUDA_DRIVER"
#: Variables that setup.py reads.
BUILD_VARIABLES = ("TMS_WERROR", "TMS_PINNED_VERSION", "TMS_SYMBOLS")
#: The other variables that the core does not read: those of the simulated GPU (csrc/simulator/simulator.h), the tests and
#: the demo.
_OTHER_VARIABLES = {
    "TMS_DEMO_CHILD",
    *(f"TMS_GPU_{word}" for word in ("NCCL", "RECORD", "SEED")),
    *(f"TMS_SIMULATED_{word}" for word in ("BANDWIDTH", "DEVICES", "FAULT", "MEMORY", "NCCL_MEMORY", "PEERS", "POISON")),
    *(f"TMS_SIMULATED_{word}" for word in ("REPORT", "SHARED", "TRACE", "VISIBLE")),
}


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed, so no file can be made there
        return "/"


#: The working directory of the import. The program may change its own later, even to a folder of another user.
_DIRECTORY = _working_directory()


def setting(name: str) -> str:
    """Return the value of an environment variable, without spaces around it. It is "" if the variable has no effect."""
    return "" if _core.secure_execution else os.environ.get(name, "").strip()


def init_enabled() -> bool:
    """Return whether ``TMS_INIT_ENABLE`` requests that everything is managed, which only a preload library can do."""
    return setting("TMS_INIT_ENABLE").lower() in ("1", "true", "yes")


def path_at_import(path: str) -> str:
    """Return the absolute path that `path` meant when the package was imported."""
    return os.path.normpath(os.path.join(_DIRECTORY, path))


def driver_library() -> str:
    """Return the name or the absolute path of the library that the core loads as the CUDA driver.

    Raises:
        DriverUnavailableError: TMS_CUDA_DRIVER is a relative path, which the core refuses.
    """
    library = setting(_DRIVER) or "libcuda.so.1"
    if "/" in library and not os.path.isabs(library):
        raise DriverUnavailableError(
            f"the CUDA driver could not be loaded: '{library}' is not an absolute path. Set {_DRIVER} to an absolute path."
        )
    return library


def known_variables() -> set[str]:
    """Return the names of all variables, except those of the build."""
    return set(_core.SETTINGS) | {variable.name for variable in PYTHON_VARIABLES} | _OTHER_VARIABLES


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return the names that look like variables of this package but are unknown."""
    known = known_variables().union(BUILD_VARIABLES)
    return sorted(name for name in names if name.startswith(_PREFIX) and name not in known)


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warn once in a process, at its first use of the package. A process that only inherits variables is not warned."""
    for name in unknown_variables(os.environ):
        logger.warning(
            "the environment variable %s has no effect: it is unknown%s", name, suggestion(name, known_variables())
        )
