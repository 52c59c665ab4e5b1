"""Write files that hold all of their content or do not exist, and name them by the rank and the role of this process.

A file is made under a new random name in its folder (``_folders.py``), and renamed. So it follows no link, takes no file
that another user has made, and replaces a link by itself. Files have mode 0600, because they hold call stacks, tags or data,
unless the caller says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch_memory_saver._folders import PRIVATE_FILE, PRIVATE_FOLDER, Folder, opened_folder

__all__ = [
    "append_to_file",
    "can_lock",
    "copy_file",
    "default_role",
    "own_rank",
    "remove_file",
    "write_bytes_file",
    "write_file",
    "write_text_file",
]

_COMMAND_LINE = "/proc/self/cmdline"
#: multiprocessing's name of a process that it has not started.
_MAIN_PROCESS = "MainProcess"


def own_rank() -> int | None:
    """Return the rank in torch.distributed if that is initialised, else in the variable ``RANK``; None without either."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def default_role() -> str:
    """Return the title that the process has given itself, as servers do with setproctitle; else its name in multiprocessing,
    if that has started it; else the program's name."""
    processes = sys.modules.get("multiprocessing.process")
    name = processes.current_process().name if processes else _MAIN_PROCESS
    return _own_title() or (name if name != _MAIN_PROCESS else "") or _program_name(sys.argv, sys.orig_argv)


def _own_title() -> str:
    """Return the title that replaced this process's command line; "" if none did."""
    try:
        with open(_COMMAND_LINE, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # no /proc: the role falls back to the program's name
        return ""
    title = words[0].decode(errors="replace").strip()
    return "" if not sys.orig_argv or title == sys.orig_argv[0] else title


def _program_name(arguments: Sequence[str], original: Sequence[str]) -> str:
    path = arguments[0] if arguments and arguments[0] not in ("", "-c", "-m") else ""
    name = os.path.basename(path)
    if name == "__main__.py":  # python -m package
        name = os.path.basename(os.path.dirname(path))
    return name.removesuffix(".py") or (os.path.basename(original[0]) if original else "") or "python"


#: With this one PyTorch's own snapshots are written (Python's default until 3.13), and its memory_viz page reads it.
_PICKLE_PROTOCOL = 4
#: The number of times that a folder is made again if another process removes it before the file is in it.
_ATTEMPTS = 5
_RANDOM_BYTES = 8
#: Errors of a full file system or quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(snapshot: dict[str, Any], target: Path, aside: Path) -> None:
    """Write a snapshot under a hidden name in the folder `aside`, and rename it to `target`. Make missing folders.

    Raises:
        OSError: It could not be written. Nothing is left behind.
    """
    _write(
        lambda file: pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL),
        target,
        aside,
        "write_snapshot",
        "the snapshot was",
    )


def write_text_file(
    text: str, target: Path, operation: str, what: str, mode: int = PRIVATE_FILE, folder_mode: int = PRIVATE_FOLDER
) -> None:
    """Write a text in the same way, in the folder of `target`. `operation` and `what` ("the events were") are for the
    message of a failure. `mode` and `folder_mode` have the permissions of the file and of missing folders, of which the
    process's umask takes some.

    Raises:
        OSError: It could not be written. Nothing is left behind, and an existing file is unchanged.
    """
    content = text.encode(errors="backslashreplace")  # a name from outside may have half of a surrogate pair
    _write(lambda file: file.write(content), target, target.parent, operation, what, mode, folder_mode)


def write_bytes_file(content: bytes, target: Path, operation: str, what: str) -> None:
    """Write bytes in the same way.

    Raises:
        OSError: See :func:`write_text_file`.
    """
    _write(lambda file: file.write(content), target, target.parent, operation, what)


def copy_file(source: Path, target: Path, operation: str, what: str) -> None:
    """Write a copy of a file in the same way.

    Raises:
        OSError: See :func:`write_text_file`.
    """
    write_bytes_file(source.read_bytes(), target, operation, what)


def append_to_file(path: str | os.PathLike[str]) -> int:
    """Return a descriptor that appends to a file of this user. The file is made if it is missing, and its folder is not.

    Raises:
        OSError: The file cannot be opened, is a link, or belongs to another user.
    """
    target = Path(path)
    with opened_folder(target.parent, exact=True) as folder:
        return folder.open_own(target.name, os.O_WRONLY | os.O_APPEND)


def can_lock(descriptor: int) -> bool:
    """Return whether no process holds the lock of an open file (flock). It is taken for a moment, and shared, so that two
    readers do not take each other for its holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def remove_file(path: Path) -> None:
    """Remove a file of this user, if it exists.

    Raises:
        OSError: The file cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError), opened_folder(path.parent, exact=True) as folder:
        folder.remove(path.name)


def _write(
    write: Callable[[BinaryIO], object],
    target: Path,
    aside: Path,
    operation: str,
    what: str,
    mode: int = PRIVATE_FILE,
    folder_mode: int = PRIVATE_FOLDER,
) -> None:
    hidden = f".{target.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp"
    try:
        if target.name in ("", ".."):  # "" is that of "." and "/"
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with opened_folder(aside, mode=folder_mode, exact=True) as folder:
            try:
                with open(hidden, "wb", opener=lambda name, _flags: folder.create(name, mode)) as file:
                    write(file)
                _move(folder, hidden, target, aside)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error says what is wrong with the folder
                    os.unlink(hidden, dir_fd=folder.descriptor)
                raise
    except OSError as error:
        advice = "make room or choose another folder" if error.errno in _FULL else "choose another folder"
        raise OSError(
            error.errno,
            f"{operation}: {error.strerror}: {what} not written; {advice}",
            os.fspath(target),
        ) from error


def _move(folder: Folder, hidden: str, target: Path, aside: Path) -> None:
    if target.parent == aside:
        os.replace(hidden, target.name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        return
    for attempt in range(_ATTEMPTS):
        try:
            with opened_folder(target.parent, mode=PRIVATE_FOLDER, exact=True) as goal:
                os.replace(hidden, target.name, src_dir_fd=folder.descriptor, dst_dir_fd=goal.descriptor)
            return
        except FileNotFoundError:  # another process has removed the folder in between
            if attempt == _ATTEMPTS - 1:
                raise
