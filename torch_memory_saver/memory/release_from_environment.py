"""TMS_RELEASE_CACHED: `release_cached` before each pause, or every so many seconds, without a change of the program."""

from __future__ import annotations

import logging
import math

from torch_memory_saver._services import Periodic, before_pause

from .release import release_cached

__all__ = ["read_seconds", "start"]

logger = logging.getLogger("torch_memory_saver")

_VARIABLE = "TMS_RELEASE_CACHED"
#: A periodic release that a capture puts off is tried again after so many seconds, or earlier if the period is shorter.
_AGAIN_AFTER_S = 1.0


def start(value: str) -> None:
    """Starts what the variable requests. A value that is neither "pause" nor a number of seconds is reported and ignored."""
    if value.lower() == "pause":
        before_pause.add(_VARIABLE, _release)
        return
    seconds = read_seconds(value)
    if seconds is None:
        logger.warning("%s='%s' is ignored: it may be pause, or a number of seconds above 0", _VARIABLE, value)
        return
    Periodic("torch_memory_saver: release_cached", seconds, lambda: _release_or_put_off(seconds)).start()


def read_seconds(value: str) -> float | None:
    """The seconds between two releases. None for anything but a number above 0."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def _release() -> str | None:
    """Releases; returns why not, if not."""
    report = release_cached()
    logger.log(logging.INFO if report.skipped is None else logging.DEBUG, "%s: %s", _VARIABLE, report)
    return report.skipped


def _release_or_put_off(seconds: float) -> float | None:
    return min(seconds, _AGAIN_AFTER_S) if _release() == "capture" else None
