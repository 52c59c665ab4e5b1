"""Warnings that are logged once in a process for each cause. They are about mistakes that change nothing else: the call goes
on, and no exception shows them.

Any thread; no lock. A forked child does not repeat what its parent has logged.
"""

from __future__ import annotations

import logging

__all__ = ["forget_warnings", "warn_once"]

logger = logging.getLogger("torch_memory_saver")

#: Causes that contain names of the program, such as tags, must not grow without end.
_MOST_CAUSES = 1000

_logged: dict[str, object] = {}


def warn_once(cause: str, message: str, *arguments: object) -> None:
    """Log a warning, unless one of the same cause was logged before.

    Args:
        cause: The name of the cause. It is not shown.
        message: The text, in the format of :mod:`logging`.
        arguments: The values of the text.
    """
    if len(_logged) >= _MOST_CAUSES:
        return
    mine = object()
    if _logged.setdefault(cause, mine) is mine:
        logger.warning(message + " (Logged once.)", *arguments)


def forget_warnings() -> None:
    """Let every cause be logged again. For tests."""
    _logged.clear()
