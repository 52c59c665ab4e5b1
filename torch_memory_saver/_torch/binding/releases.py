"""Releases of PyTorch: the oldest that the package works with, and the newest that it was tested with."""

from __future__ import annotations

from torch_memory_saver._interface import __version__
from torch_memory_saver._text import warn_once

__all__ = ["NEWEST_TESTED", "OLDEST", "is_too_old", "is_untested", "version_of", "warn_if_untested"]

#: Oldest supported version. Before it, a routed pool serves every thread of the process.
OLDEST = (2, 8)
#: Newest version that the tests ran with. A test compares it with .ci/run and with tests/versions.json.
NEWEST_TESTED = (2, 14)


def is_too_old(release: str) -> bool:
    """Return whether a release of PyTorch, such as "2.6.0+cu124", is older than the oldest that this package works with."""
    return version_of(release) < OLDEST


def is_untested(release: str) -> bool:
    """Return whether a release of PyTorch is newer than every release that this package was tested with."""
    return version_of(release) > NEWEST_TESTED


def warn_if_untested(release: str) -> None:
    """Log a warning if `is_untested`. A process logs one."""
    if is_untested(release):
        warn_once(
            "untested PyTorch",
            "PyTorch %s is newer than %d.%d, the newest release that torch_memory_saver %s was tested with: run the tests "
            "of your program, or install a tested release",
            release,
            *NEWEST_TESTED,
            __version__,
        )


def version_of(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release, or zeros if it has none."""
    try:
        major, minor = release.split("+")[0].split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0
