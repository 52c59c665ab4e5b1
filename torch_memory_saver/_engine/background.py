"""Work that higher layers attach to the engine: before each pause, after each pause and resume, or periodically on a
thread; and the explanation of out-of-memory errors. The engine knows none of these layers.

Environment variables request most of the work: words of TMS_DEBUG, and variables of their own. The table in _additions.py
says what each starts. Requested work is started once in a process, at the first use of the package, and registers its
functions here.

Any thread may register and call. There is no lock.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable

from torch_memory_saver import _core
from torch_memory_saver._additions import added
from torch_memory_saver._engine.variables import path_at_import, setting
from torch_memory_saver._folders import chosen_folder
from torch_memory_saver._text import suggestion
from torch_memory_saver.errors import OutOfMemoryError

__all__ = [
    "Periodic",
    "RegisteredWork",
    "after_call",
    "before_pause",
    "debug_folder",
    "explain",
    "requested_recordings",
    "start_from_environment",
]

logger = logging.getLogger("torch_memory_saver")

_DEBUG, _DEBUG_FOLDER, _DEFAULT_FOLDER = "TMS_DEBUG", "TMS_DEBUG_DIR", "torch_memory_saver_debug"
#: The seconds for which the process's exit waits for running work.
_EXIT_PATIENCE_S = 5.0


def _call(name: str, work: Callable[[], object]) -> object:
    """Return the result of `work`. A failure is logged: there is no caller who could handle it."""
    try:
        return work()
    except Exception:
        logger.warning("%s failed", name, exc_info=True)
        return None


class RegisteredWork:
    """Functions that are called on the thread of each pause or resume."""

    def __init__(self) -> None:
        self._work: list[tuple[str, Callable[[], object]]] = []
        self._thread = threading.local()

    @property
    def tags(self) -> tuple[str, ...] | None:
        """The tags of the call for which the work runs on this thread; None for every tag."""
        tags: tuple[str, ...] | None = getattr(self._thread, "tags", None)
        return tags

    def add(self, name: str, work: Callable[[], object]) -> None:
        """Call `work` each time from now on. A failure is logged with `name`, and the pause or resume continues."""
        self._work.append((name, work))

    def run(self, tags: tuple[str, ...] | None = None) -> None:
        """Call all registered work, in the order in which it was added.

        Args:
            tags: The tags of the pause or resume, which the work can read from `tags`. None: every tag.
        """
        self._thread.tags = tags
        for name, work in self._work:
            _call(name, work)


#: Work that is called before a pause changes anything. It belongs to this process, and a forked child inherits it.
before_pause = RegisteredWork()
#: Work that is called after each pause and resume, whether the call succeeded or not. A forked child inherits it.
after_call = RegisteredWork()


class Periodic:
    """Work that a daemon thread does periodically until the process exits. The work continues in forked children.

    Args:
        name: Name of the thread, which the log uses as well.
        seconds: Seconds from the end of one call to the begin of the next.
        work: Function that does the work. It returns None, or, if the work could not be done now, the number of seconds
            after which to try again. A failure is logged, and the work is done again after `seconds`.
        wait: Function that waits for the given number of seconds and returns whether to end. Tests pass their own.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        work: Callable[[], float | None],
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._work = work
        self._given_wait = wait
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. The thread ends before the interpreter does, so that it does not call torch during the exit."""
        self._start_thread()
        _running.add(self)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, and wait for work that is under way, a few seconds at most."""
        self._ended.set()
        _running.discard(self)
        atexit.unregister(self.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_EXIT_PATIENCE_S)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait = self._given_wait or self._ended.wait
        delay = self._seconds
        while not wait(delay):
            again = _call(self._name, self._work)
            delay = again if isinstance(again, float) else self._seconds

    def restart(self) -> None:
        """Start the thread again, in a forked child, which has no threads of its parent."""
        self._ended = threading.Event()  # another thread may have held its lock
        self._start_thread()


_running: set[Periodic] = set()


def _after_fork_in_child() -> None:
    for periodic in list(_running):
        periodic.restart()


os.register_at_fork(after_in_child=_after_fork_in_child)


def requested_recordings(text: str) -> tuple[list[str], list[str]]:
    """Split a value of TMS_DEBUG into its known words, each once and in the order of the table, and its unknown ones."""
    words = dict.fromkeys(word.strip().lower() for word in text.split(","))
    recordings = added("recording")
    known = [word for word in recordings if word in words]
    return known, [word for word in words if word and word not in recordings]


def debug_folder() -> str:
    """Return the absolute path of the folder for what TMS_DEBUG records."""
    return path_at_import(setting(_DEBUG_FOLDER) or _DEFAULT_FOLDER)


def _start_recordings() -> None:
    known, unknown = requested_recordings(setting(_DEBUG))
    recordings = added("recording")
    for word in unknown:
        allowed = ", ".join(recordings)
        logger.warning("%s: '%s' is ignored (allowed: %s)%s", _DEBUG, word, allowed, suggestion(word, recordings))
    if known:
        folder = chosen_folder(debug_folder())
        for word in known:
            _call(f"{_DEBUG}: {word}", functools.partial(recordings[word], os.path.join(folder, word)))


@functools.cache
def start_from_environment() -> None:
    """Start what the environment requests, and what every process has. Called at the first use of the package; does nothing
    the second time, where the package is disabled, and in sub-interpreters, which cannot end a daemon thread. A failure is
    logged, such as that of a recording which needs a folder that is not installed."""
    if not _core.main_interpreter or _core.get_disabled():
        return
    _start_recordings()
    for variable, start in added("variable").items():
        value = setting(variable)
        if value:
            _call(variable, functools.partial(start, value))
    for name, start_always in added("first use").items():
        _call(name, start_always)


def explain(error: OutOfMemoryError, tags: tuple[str, ...] | None) -> None:
    """Have the error of a resume explained, after the last attempt of the resume."""
    for explanation in added("out of memory").values():
        explanation(error, tags)
