"""The folders in which the package keeps files.

``csrc/base/private_directory.h`` has the rule: a folder is private, or shared with other users, or the package uses a folder
of its own in it (``/tmp``). Files are addressed relative to the descriptor of their folder, so another user cannot redirect
a file by replacing the folder or a part of its path. Any thread may call. The set of warnings is changed by single
operations only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver import _core

__all__ = [
    "PRIVATE_FILE",
    "PRIVATE_FOLDER",
    "Folder",
    "check_path",
    "chosen_folder",
    "is_changed_by_others",
    "opened_folder",
    "private_directory",
    "why_not_writable",
]

logger = logging.getLogger("torch_memory_saver")

#: Permissions of the files and folders that the package makes, unless a reader of another user is expected.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
#: Permissions with which other users can change a file or a folder.
_OTHERS_WRITE = 0o022

#: Name of the package's own folder for most files.
_OWN = "torch_memory_saver"
#: Shared folders of which the log has a warning.
_warned: set[Path] = set()


@dataclass(frozen=True)
class Folder:
    """An open folder.

    Attributes:
        descriptor: Descriptor that serves as ``dir_fd`` of other calls.
        path: Absolute path, for messages.
        shared: The check that failed, if the folder is shared with other users; "" if it is private.
    """

    descriptor: int
    path: Path
    shared: str

    @property
    def owner(self) -> int:
        """The uid of the folder's owner."""
        return os.fstat(self.descriptor).st_uid

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            return os.listdir(listing)
        finally:
            os.close(listing)

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor, for writing, of a file that did not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, mode, dir_fd=self.descriptor)

    def open_own(self, name: str, flags: int) -> int:
        """Return a descriptor of a file that is changed in place, which is made if it is missing.

        Raises:
            PermissionError: The name is a link, belongs to another user, is no regular file, or the file has other names.
        """
        # O_NONBLOCK: the name may be a FIFO.
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, PRIVATE_FILE, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise self._not_own(name) from error
            raise OSError(error.errno, error.strerror, os.fspath(self.path / name)) from error
        found = os.fstat(descriptor)
        if not _is_own(found) or found.st_nlink > 1:
            os.close(descriptor)
            raise self._not_own(name)
        return descriptor

    def _not_own(self, name: str) -> PermissionError:
        return PermissionError(
            errno.EPERM,
            "it is not a regular file of this user with one name: remove it, or choose another path",
            os.fspath(self.path / name),
        )

    def remove(self, name: str) -> None:
        """Remove a file of this user. Does nothing if it does not exist, is no regular file, or belongs to another user."""
        with contextlib.suppress(FileNotFoundError):
            if _is_own(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)):
                os.unlink(name, dir_fd=self.descriptor)

    def is_own_folder(self, name: str) -> bool:
        """Return whether a name is a folder of this user, and no link to one."""
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

    def remove_folder(self, name: str) -> None:
        """Remove a folder with the files in it, and follow no link.

        Raises:
            OSError: The folder cannot be removed, for example because another process removes it too.
        """
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            for entry in os.listdir(inside):
                os.unlink(entry, dir_fd=inside)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=self.descriptor)


@contextlib.contextmanager
def opened_folder(path: str | os.PathLike[str], *, mode: int = 0, exact: bool = False) -> Iterator[Folder]:
    """Open a folder for files that are safe in every folder. The log warns once of a folder that other users can change.

    Args:
        path: The folder.
        mode: Permissions of missing folders, which are made. 0: none is made.
        exact: The files have given paths, so a folder such as ``/tmp`` is used itself.

    Raises:
        OSError: The folder cannot be used.
    """
    with contextlib.closing(_open(path, mode, exact)) as folder:
        if folder.shared:
            _warn(folder)
        yield folder


@contextlib.contextmanager
def private_directory(
    path: str | os.PathLike[str], *, mode: int = 0, may_be_of_user: bool = False, own: str = _OWN
) -> Iterator[Folder]:
    """Open a folder whose files this process or other processes trust.

    Args:
        path: The folder.
        mode: See :func:`opened_folder`.
        may_be_of_user: Whether to accept a folder of another user, to which only that user can write. Nothing in it may be
            trusted then.
        own: Name of the package's own folder in a folder such as ``/tmp``, without the uid.

    Raises:
        PermissionError: The folder belongs to another user, or others can write to it.
        OSError: The folder cannot be used.
    """
    with contextlib.closing(_open(path, mode, False, own)) as folder:
        if folder.shared and not (may_be_of_user and not is_changed_by_others(os.fstat(folder.descriptor))):
            raise _refused(folder)
        yield folder


def check_path(path: Path) -> None:
    """Check the folders above a private folder from which a program will load libraries by its path.

    Raises:
        PermissionError: Another user can put another folder in the place of one of them.
        OSError: A folder cannot be used.
    """
    for parent in path.absolute().parents:
        with contextlib.closing(_open(parent, 0, True)) as folder:
            if folder.shared:
                raise _refused(folder)


def chosen_folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the folder that is used for `path`, and warn if that is a shared one. Makes nothing."""
    try:
        with opened_folder(path) as folder:
            return folder.path
    except OSError as error:  # it does not exist yet, or its user will get this error
        return Path(error.filename)


def _open(path: str | os.PathLike[str], mode: int, exact: bool, own: str = _OWN) -> Folder:
    descriptor, name, shared = _core.open_directory(os.path.abspath(path), mode, exact, own)
    return Folder(descriptor, Path(name), shared)


def _refused(folder: Folder) -> PermissionError:
    found = os.fstat(folder.descriptor)
    return PermissionError(
        errno.EPERM,
        f"{folder.shared} failed (owner: uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): choose a folder of this "
        "user to which no other user can write",
        os.fspath(folder.path),
    )


def _warn(folder: Folder) -> None:
    if _warned.isdisjoint((folder.path, *folder.path.parents)):
        _warned.add(folder.path)
        logger.warning(
            "the folder %s is shared with other users: %s failed. The files in it are written safely, but other users can "
            "remove or replace them. Choose a folder of this user",
            folder.path,
            folder.shared,
        )


def is_changed_by_others(found: os.stat_result) -> bool:
    """Return whether users other than its owner can change a file or a folder."""
    return bool(found.st_mode & _OTHERS_WRITE)


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def why_not_writable(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or None if a file can be created. A file without a name is created to
    find out."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
