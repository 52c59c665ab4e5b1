"""Pass the lines of the native log to :mod:`logging`.

The core keeps the lines that any thread writes while one of the package's longer calls runs. They are passed on at the end
of that call, on its thread, with no lock held. A line goes either to the logger ``torch_memory_saver`` or to stderr, as in a
program without Python. It goes to stderr if no handler is installed. Lines of level info or debug that ``TMS_LOG_LEVEL``
requests also go to stderr if the logger is not enabled for them, so they need no set-up of logging. A program that turns
warnings or errors of the logger off gets none of these lines.

Lines that are written at other moments (a free by PyTorch, a thread of the library, a forked child, the exit) go to stderr
at once: no call would pass them on, and a process that crashes would lose them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_memory_saver import _core

__all__ = ["log_info", "passes_log_on"]

logger = logging.getLogger("torch_memory_saver")

_INFO = 3
_LEVELS = {1: logging.ERROR, 2: logging.WARNING, _INFO: logging.INFO, 4: logging.DEBUG}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def passes_log_on(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function so that the log lines of its calls reach :mod:`logging`."""

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        lines: list[tuple[int, str]] = []
        try:
            return _core.collect_log(functools.partial(function, *arguments, **keywords), lines)
        finally:
            for level, text in lines:
                _pass_on(level, text)

    return call


def log_info(text: str) -> None:
    """Log a message of Python code at level info, by the rules for the core's lines: ``TMS_LOG_LEVEL=info`` shows it even if
    the program has not set up logging."""
    _pass_on(_INFO, text)


def _pass_on(level: int, text: str) -> None:
    enabled = logger.isEnabledFor(_LEVELS[level])
    if enabled and logger.hasHandlers():
        logger.log(_LEVELS[level], "%s", text)
    elif enabled or _LEVELS[level] < logging.WARNING:
        _core.write_log(level, text)
