"""`log_memory`: rows of a memory log before and after the calls of a function."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch_memory_saver.errors import InvalidArgumentError

from .log import MemoryLog
from .release import around, release_cached

__all__ = ["log_memory"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

logger = logging.getLogger("torch_memory_saver")


class log_memory:
    """A decorator: rows of a memory log before and after each call, such as ``wake_up``, ``sleep`` or ``update_weights``.

    The labels are "before sleep" and "after sleep"; of a call that raises, "after sleep (KeyError)". One object may decorate
    several functions, whose rows go to one log. Decorates functions and coroutine functions. If a row cannot be taken, that
    is logged as a warning and the call goes on.

    Args:
        role: See :class:`MemoryLog`.
        path: As there.
        log: A log to use. Then `role` and `path` must be None.
        release: Whether cached memory is released after each call (`release_cached`). A third row, "released after sleep",
            follows.

    Attributes:
        log: The log.

    Raises:
        InvalidArgumentError: `log` together with `role` or `path`; or something else than a function is decorated.
    """

    def __init__(
        self,
        role: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        log: MemoryLog | None = None,
        release: bool = False,
    ) -> None:
        if log is not None and (role is not None or path is not None):
            raise InvalidArgumentError("log has a role and a path: pass either the log or these")
        self.log = MemoryLog(role, path=path) if log is None else log
        self._release = release

    def __call__(self, function: _Function) -> _Function:
        name = getattr(function, "__name__", type(function).__name__)
        return around(function, lambda: self._rows(name))

    @contextlib.contextmanager
    def _rows(self, name: str) -> Iterator[None]:
        self._mark(f"before {name}")
        try:
            yield
        except BaseException as error:
            self._mark(f"after {name} ({type(error).__name__})")
            raise
        self._mark(f"after {name}")
        if self._release:
            release_cached()
            self._mark(f"released after {name}")

    def _mark(self, label: str) -> None:
        try:
            self.log.mark(label)
        except Exception:
            logger.warning("no row of the memory log %s: it could not be taken", label, exc_info=True)
