"""Remove what dead processes have left in the shared store, by the rules of ``csrc/backup/shared/folder.h``."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from torch_memory_saver._published import MANIFEST
from torch_memory_saver._shared_folder import (
    HOLDERS,
    LOCK,
    NAMES,
    OBJECTS,
    directories_in,
    files_in,
    is_part,
    opened,
    opened_store,
    remove_unlinked,
)

__all__ = ["Removed", "clean_store"]


@dataclass
class Removed:
    """The result of a clean-up.

    Attributes:
        holders: Number of holders of dead processes.
        objects: Number of objects that no process and no published name linked.
        unfinished: Number of unfinished objects that no process wrote.
        bytes: Bytes of the objects and unfinished objects.
        failures: A sentence for each thing that is still there.
    """

    holders: int = 0
    objects: int = 0
    unfinished: int = 0
    bytes: int = 0
    failures: list[str] = field(default_factory=list)


def clean_store(path: Path) -> Removed:
    """Remove what dead processes have left. Live processes may use the store: none loses bytes, and an object that
    one of them links at this moment may lose its name.

    Raises:
        OSError: The folder does not exist, is refused (see ``opened_store``), or cannot be read.
    """
    removed = Removed()
    with opened_store(path) as folder, contextlib.ExitStack() as stack:
        try:
            objects = stack.enter_context(opened(folder.descriptor, OBJECTS))
        except FileNotFoundError:  # no process has made its holder yet
            return removed
        for name, directory in directories_in(folder.descriptor, NAMES):
            with _noted(removed, folder.path / NAMES / name):
                _remove_unnamed(folder.descriptor, name, directory, objects, removed)
        for name, holder in directories_in(folder.descriptor, HOLDERS):
            with _noted(removed, folder.path / HOLDERS / name):
                _remove_if_dead(folder.descriptor, name, holder, objects, removed)
        # Unfinished files go first. A process that was killed just before its object was finished has left two names.
        for name, found in files_in(objects):
            if is_part(name, found):
                with _noted(removed, folder.path / OBJECTS / name):
                    _remove_part(objects, name, removed)
        for name, _ in files_in(objects):
            with _noted(removed, folder.path / OBJECTS / name):
                _remove_unlinked(objects, name, removed)
    return removed


@contextlib.contextmanager
def _noted(removed: Removed, path: Path) -> Iterator[None]:
    """Note a failure to remove `path`. It is no failure if another process has removed it."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        removed.failures.append(f"{path} was not removed: {error.strerror}")


def _remove_if_dead(root: int, name: str, holder: int, objects: int, removed: Removed) -> None:
    try:
        with opened(holder, LOCK, os.O_RDWR) as lock:
            if _lock(lock, holder, LOCK):
                _remove_holder(root, name, holder, objects, removed)
            return
    except FileNotFoundError:
        pass
    # The lock is the first file of a holder. If it is missing, the directory is empty, or another process has removed the
    # lock. A process that is just making this holder makes another one.
    with contextlib.suppress(OSError):
        os.rmdir(f"{HOLDERS}/{name}", dir_fd=root)
        removed.holders += 1
        return
    if LOCK not in os.listdir(holder):
        _remove_holder(root, name, holder, objects, removed)


def _remove_holder(root: int, name: str, holder: int, objects: int, removed: Removed) -> None:
    """Remove a holder whose lock this process has, or that has lost its lock. The lock goes last, so that an interrupted
    removal is made again."""
    for link, found in files_in(holder):
        if stat.S_ISDIR(found.st_mode):  # a publisher has left it
            with opened(holder, link) as directory:
                _remove_links(directory, objects, removed)
            os.rmdir(link, dir_fd=holder)
    _remove_links(holder, objects, removed)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(LOCK, dir_fd=holder)
    os.rmdir(f"{HOLDERS}/{name}", dir_fd=root)
    removed.holders += 1


def _remove_links(directory: int, objects: int, removed: Removed) -> None:
    """Remove the files of an open directory but for a lock, and the objects that have no other link."""
    for link, _ in files_in(directory):
        if link != LOCK:
            os.unlink(link, dir_fd=directory)
            with contextlib.suppress(FileNotFoundError):
                _remove_unlinked(objects, link, removed)


def _remove_unnamed(root: int, name: str, directory: int, objects: int, removed: Removed) -> None:
    """Remove a published name that has no manifest: a process that removed it has died, or is not done yet."""
    if MANIFEST not in os.listdir(directory):
        _remove_links(directory, objects, removed)
        with contextlib.suppress(OSError):  # another process has published the name again
            os.rmdir(f"{NAMES}/{name}", dir_fd=root)


def _remove_part(objects: int, name: str, removed: Removed) -> None:
    """Remove an unfinished object unless a process writes it."""
    with opened(objects, name, os.O_RDONLY) as part:
        if _lock(part, objects, name):
            os.unlink(name, dir_fd=objects)
            found = os.fstat(part)
            if found.st_nlink == 0:  # otherwise it has been finished
                removed.unfinished += 1
                removed.bytes += found.st_size


def _remove_unlinked(objects: int, name: str, removed: Removed) -> None:
    freed = remove_unlinked(objects, name)
    removed.objects += freed > 0
    removed.bytes += freed


def _lock(descriptor: int, directory: int, name: str) -> bool:
    """Lock an open file, and return whether it still has this name: another process may have removed it before."""
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return os.path.samestat(os.fstat(descriptor), found)
