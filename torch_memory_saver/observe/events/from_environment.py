"""The event file and the metrics file of a process, which are written without a change of the program.

The recording `events` of TMS_DEBUG requests the event file, and TMS_METRICS_FILE requests the metrics file.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from torch_memory_saver._files import own_rank, remove_file
from torch_memory_saver._services import Periodic, after_call, path_at_import
from torch_memory_saver.observe.events.event_file import write_events
from torch_memory_saver.observe.events.log import events, sample_free_memory
from torch_memory_saver.observe.events.metrics import write_metrics

__all__ = ["EventFile", "MetricsFile", "start_event_files", "start_metrics"]

logger = logging.getLogger("torch_memory_saver")

_EVENTS, _METRICS = "TMS_DEBUG=events", "TMS_METRICS_FILE"
#: Seconds after which the event file of a process is replaced, if something happened since.
_PERIOD_S = 5.0


class _Written:
    """A file that is written again and again.

    A failure changes nothing else: it is counted, and logged once for each cause.

    Attributes:
        failures: Number of attempts that failed so far.
    """

    def __init__(self, variable: str) -> None:
        self.failures = 0
        self._variable = variable
        self._logged: set[int | None] = set()

    def attempt(self, write: Callable[[], Path]) -> Path | None:
        """Call `write`, and return the path that was written, or None after a failure."""
        try:
            return write()
        except OSError as error:
            self.failures += 1
            if error.errno not in self._logged:
                self._logged.add(error.errno)
                logger.warning("%s: %s; later failures for this reason are only counted", self._variable, error)
            return None


class EventFile(_Written):
    """The event file of this process.

    Its name contains the rank as soon as the rank is known.

    Args:
        directory: Folder of the file.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(_EVENTS)
        self._directory = Path(directory)
        self._lock = threading.Lock()
        self._written: Path | None = None
        self._recorded = 0
        self._pid = os.getpid()

    def write_if_new(self, exits: bool = False) -> None:
        """Replace the file if something happened since it was written.

        With `exits` the file is replaced even if nothing happened, because it then states that nothing comes after it. A
        process that never had an event gets no file.
        """
        with self._lock:
            self._restart_in_child()
            log = dataclasses.replace(events(), exited=exits)
            recorded = log.dropped + len(log.events)
            if recorded == (0 if exits else self._recorded):
                return
            path = self.attempt(lambda: write_events(self._directory / _file_name(), log=log))
            if path is None:
                return
            if self._written is not None and self._written != path:
                remove_file(self._written)  # written before the rank was known
            self._written, self._recorded = path, recorded

    def _restart_in_child(self) -> None:
        """Begin a new file in a forked child, which has its own events and leaves its parent's file unchanged."""
        if self._pid != os.getpid():
            self._pid, self._written, self._recorded = os.getpid(), None, 0

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()


def _file_name() -> str:
    rank = own_rank()
    return f"{'' if rank is None else f'rank{rank}-'}pid{os.getpid()}.json"


def start_event_files(directory: str) -> None:
    """Begin to write the events of this process to a folder, on a thread every few seconds and at exit.

    The events then include the free memory of devices.
    """
    sample_free_memory()
    file = EventFile(directory)
    os.register_at_fork(after_in_child=file.after_fork_in_child)
    Periodic("torch_memory_saver: events", _PERIOD_S, file.write_if_new).start()
    atexit.register(file.write_if_new, exits=True)


class MetricsFile(_Written):
    """The metrics file of this process.

    Args:
        name: Path of the file, in which ``{pid}`` and ``{rank}`` are replaced.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_METRICS)
        self._name = name

    def write(self) -> None:
        """Replace the file."""
        rank = own_rank()
        name = self._name.replace("{pid}", str(os.getpid())).replace("{rank}", "none" if rank is None else str(rank))
        self.attempt(lambda: write_metrics(name))


def start_metrics(name: str) -> None:
    """Write the metrics to a file now, and after each pause and resume."""
    file = MetricsFile(path_at_import(name))
    file.write()
    after_call.add(_METRICS, file.write)
