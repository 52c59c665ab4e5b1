"""TMS_MEMORY_HISTORY, TMS_SNAPSHOT_DIR and TMS_SNAPSHOT_EVERY: a program's memory is recorded without a change of it.

Nothing here initialises CUDA: a process that does not use it has nothing to record.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch_memory_saver._services import Periodic, before_pause, layer, record_history
from torch_memory_saver.errors import TorchMemorySaverError

from .sampler import MemorySnapshotSampler

__all__ = ["Period", "check_every", "read_entries", "read_period", "start_history", "start_snapshots"]

logger = logging.getLogger("torch_memory_saver")

_HISTORY, _DIRECTORY, _EVERY = "TMS_MEMORY_HISTORY", "TMS_SNAPSHOT_DIR", "TMS_SNAPSHOT_EVERY"


@dataclass(frozen=True)
class Period:
    """When snapshots are written: before each so many pauses, or every so many seconds. One of the two is 0."""

    pauses: int = 0
    seconds: float = 0.0


#: Without TMS_SNAPSHOT_EVERY.
_DEFAULT_PERIOD = Period(pauses=1)


def read_period(text: str) -> Period | None:
    """ "10" is a number of pauses, "30s" or "0.5s" one of seconds. None for anything else."""
    if text.endswith("s"):
        try:
            seconds = float(text.removesuffix("s"))
        except ValueError:
            return None
        return Period(seconds=seconds) if 0 < seconds < math.inf else None
    return Period(pauses=int(text)) if text.isdecimal() and int(text) > 0 else None


def read_entries(text: str) -> int | None:
    """The number of entries of a history. None for anything else."""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def start_history(value: str) -> None:
    """Begins to record as soon as the package uses CUDA in this process; at once, if the process uses it already. A value
    that is no number of entries is reported and ignored."""
    entries = read_entries(value)
    if entries is None:
        logger.warning("%s='%s' is ignored: it may be a number of entries of at least 1", _HISTORY, value)
        return

    def start(_torch: Any) -> None:
        try:
            logger.info("%s: %s", _HISTORY, record_history(entries))
        except TorchMemorySaverError as error:
            logger.warning("%s has no effect: %s", _HISTORY, error)

    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        start(torch)
    else:
        layer.at_first_use(start)


def check_every(_value: str) -> None:
    """Warns where TMS_SNAPSHOT_EVERY is set alone."""
    if not os.environ.get(_DIRECTORY, "").strip():
        logger.warning("%s has no effect without %s, the folder for the snapshots", _EVERY, _DIRECTORY)


def start_snapshots(directory: str) -> None:
    """Has snapshots written to a folder. A malformed TMS_SNAPSHOT_EVERY is reported, and the default is used."""
    text = os.environ.get(_EVERY, "").strip()
    period = read_period(text) if text else _DEFAULT_PERIOD
    if period is None:
        logger.warning(
            "%s='%s' is ignored: it may be a number of pauses, such as 10, or of seconds, such as 30s; snapshots are "
            "written before each pause",
            _EVERY,
            text,
        )
        period = _DEFAULT_PERIOD
    work = _Snapshots(MemorySnapshotSampler(directory, on_error="count"))
    if period.pauses:
        before_pause.add(_DIRECTORY, lambda: work.at_pause(period.pauses))
    else:
        Periodic("torch_memory_saver: snapshots", period.seconds, work.write).start()


@dataclass(frozen=True)
class _Snapshots:
    """The snapshots of this process. A forked child that can use CUDA goes on with them."""

    sampler: MemorySnapshotSampler
    pauses: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def at_pause(self, every: int) -> None:
        if next(self.pauses) % every == 0:
            self.write()

    def write(self) -> None:
        torch = layer.imported()
        # False in a forked child that cannot use its parent's CUDA, too.
        if torch is None or not torch.cuda.is_initialized():
            return
        path = self.sampler.sample()
        if path is not None:
            logger.info("%s: wrote %s, %d bytes", _DIRECTORY, path, path.stat().st_size)
