"""The folders of a series of snapshots: one for each moment, which all processes of a job share.

Several processes work in the same folder at once, on several machines too. A file gets its place by being renamed into it,
and a moment is removed by being renamed first, so no process ever sees half of either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch_memory_saver.errors import InvalidStateError

__all__ = ["moment_folder", "moments", "next_moment", "remove_oldest"]

_FOLDER = re.compile(r"step-(\d{6,})")
_COUNTER = ".moment"
_REMOVED = ".removed-"
#: Digits of the counter in its file. It always has the same size, so that it is replaced by a single write.
_COUNTER_DIGITS = 20
#: Errors of a removal that another process disturbs.
_TAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


def moment_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def moments(directory: Path) -> list[int]:
    """The steps that have a folder, in ascending order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))


def next_moment(directory: Path, last: int | None) -> int:
    """The moment for a process whose last one was `last`, from the counter that all processes share, a locked file.

    A process joins the moment under way, unless it has been in that one already: then it begins the next. So a process that
    is late by less than a moment finds itself with the others, and no clock takes part.

    Raises:
        OSError: The counter cannot be read or written.
        InvalidStateError: Its file has other contents.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / _COUNTER) as descriptor:
        text = os.pread(descriptor, 2 * _COUNTER_DIGITS, 0).decode("ascii", "replace").strip()
        if text and not text.isdecimal():
            raise InvalidStateError(
                f"the file {directory / _COUNTER} holds {text!r} instead of the number of a moment: remove it",
                operation="sample",
            )
        current = int(text or "0")
        if current == 0 or (last is not None and last >= current):
            current = max(current, last or 0) + 1
            os.pwrite(descriptor, b"%0*d" % (_COUNTER_DIGITS, current), 0)
        return current


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield descriptor
        finally:
            # Explicitly: a child that was forked in between has the descriptor as well, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def remove_oldest(directory: Path, keep: int, found: frozenset[int], current: int) -> None:
    """Removes all but `keep` moments: first those of `found`, which an earlier run left, and of the others the lowest steps.
    Never the current one.

    Other processes may remove moments at the same time. A process that is late puts its file into a moment that is made
    anew, and the next call removes that.

    Raises:
        OSError: A folder cannot be removed.
    """
    steps = sorted(moments(directory), key=lambda step: (step not in found or step == current, step))
    for step in steps[: max(0, len(steps) - keep)]:
        if step == current:
            continue
        removed = directory / f"{_REMOVED}{step}-{os.getpid()}"
        try:
            os.rename(moment_folder(directory, step), removed)
        except OSError as error:
            # Another process has removed it, or a removal of this process's was interrupted. The next call goes on.
            if error.errno not in _TAKEN:
                raise
    for name in os.listdir(directory):
        if name.startswith(_REMOVED):
            _remove(directory / name)


def _remove(folder: Path) -> None:
    """Removes a folder that other processes may be removing too, or into which one has just put a late file. What is left is
    removed by the next call."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
