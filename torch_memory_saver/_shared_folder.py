"""Locate the folder of the shared store, and open its parts as directories (``csrc/backup/shared/folder.h``)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver._folders import Folder, private_directory
from torch_memory_saver.errors import BackupIOError

__all__ = [
    "HOLDERS",
    "LOCK",
    "NAMES",
    "OBJECTS",
    "VARIABLE",
    "directories_in",
    "files_in",
    "is_object",
    "is_part",
    "key_problem",
    "opened",
    "opened_store",
    "problem_of",
    "remove_unlinked",
    "store_path",
]

VARIABLE = "TMS_SHARED_DIR"
_OWN = "torch_memory_saver-store"
OBJECTS, HOLDERS, NAMES = "objects", "holders", "names"
#: The file of a holder that its process keeps locked.
LOCK = "lock"
_OBJECT, _PART = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{32}\.part")
#: O_NONBLOCK: a name may be a FIFO.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def store_path(chosen: str | None = None) -> Path:
    """Return the path of the folder: `chosen`, or the value of TMS_SHARED_DIR, or the default.

    Raises:
        OSError: TMS_SHARED_DIR is no absolute path, so every process would have another folder.
    """
    if chosen:
        return Path(os.path.abspath(chosen))
    configured = os.environ.get(VARIABLE, "")
    if configured and not os.path.isabs(configured):
        raise OSError(errno.EINVAL, f"{VARIABLE} must be an absolute path", configured)
    return Path(configured or f"/dev/shm/{_OWN}-{os.geteuid()}")


@contextlib.contextmanager
def opened_store(path: Path) -> Iterator[Folder]:
    """Open the folder, which must exist and be private, as the store itself demands it.

    Raises:
        PermissionError: The folder belongs to another user, is a link, or others can write to it.
        OSError: The folder cannot be used.
    """
    with private_directory(path, own=_OWN) as folder:
        if folder.path.is_symlink():
            raise PermissionError(errno.EPERM, "it is a symbolic link: name the folder itself", os.fspath(folder.path))
        if folder.owner != os.geteuid():
            reason = f"it belongs to uid {folder.owner}: run this command as that user, or choose a folder of this user"
            raise PermissionError(errno.EPERM, reason, os.fspath(folder.path))
        yield folder


def problem_of(folder: Folder) -> str:
    """Return why no process can use an open store, or "": it is not on tmpfs, or see :func:`key_problem`. A file system that
    is unknown is accepted."""
    mount = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{folder.descriptor}").read_text(), re.MULTILINE)
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        if mount and fields[0] == mount[1] and (kind := fields[fields.index("-") + 1]) != "tmpfs":
            return f"it is on {kind}, and the shared store keeps its objects in memory: choose a folder below /dev/shm"
    return key_problem(folder)


def key_problem(folder: Folder) -> str:
    """Return why no process can use the key of an open store: it is damaged, of another release, or readable by others.
    Return "" if it is good, or missing: the next process makes it."""
    try:
        _core.check_store_key(folder.descriptor, os.fspath(folder.path))
    except BackupIOError as error:
        return str(error).removesuffix(".")
    return ""


@contextlib.contextmanager
def opened(directory: int, name: str, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> Iterator[int]:
    """Open a directory, or a file with other flags, by its name in an open directory. Links are not followed.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, flags | _SAFE, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def files_in(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names of an open directory, sorted, with what lstat says of each. A name that is gone is skipped."""
    for name in sorted(os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)


def directories_in(root: int, name: str) -> Iterator[tuple[str, int]]:
    """Yield the directories in a directory of the store, each open and with its name. There are none if that directory is
    missing."""
    with contextlib.suppress(FileNotFoundError), opened(root, name) as parent:
        for entry, found in files_in(parent):
            if stat.S_ISDIR(found.st_mode):
                with contextlib.suppress(FileNotFoundError), opened(parent, entry) as directory:
                    yield entry, directory


def is_object(name: str, found: os.stat_result) -> bool:
    """Return whether a file of ``objects`` or of a holder is an object."""
    return stat.S_ISREG(found.st_mode) and bool(_OBJECT.fullmatch(name))


def remove_unlinked(objects: int, name: str) -> int:
    """Remove an object without holders and published names, and return its bytes; 0 if there are some, or it is no object.
    Another process may link it during the call: it keeps its bytes, and the object loses its name."""
    found = os.stat(name, dir_fd=objects, follow_symlinks=False)
    if not is_object(name, found) or found.st_nlink > 1:
        return 0
    os.unlink(name, dir_fd=objects)
    return found.st_size


def is_part(name: str, found: os.stat_result) -> bool:
    """Return whether a file of ``objects`` is an object that a process writes, or has not finished."""
    return stat.S_ISREG(found.st_mode) and bool(_PART.fullmatch(name))
