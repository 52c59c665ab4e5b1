"""Files that hold all of their content or do not exist, and the rank and the role of this process, which their names
have.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["copy_file", "default_role", "own_rank", "write_file", "write_text_file"]

_COMMAND_LINE = "/proc/self/cmdline"


def own_rank() -> int | None:
    """The rank in torch.distributed if that is initialised, else in the variable ``RANK``; None without either."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def default_role() -> str:
    """Return the title that the process has given itself, as servers do with setproctitle; else the program's name."""
    return _own_title() or _program_name(sys.argv, sys.orig_argv)


def _own_title() -> str:
    """The title that replaced this process's command line; "" if none did."""
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
_MODE = 0o666
#: How often a folder is made again that another process removes before the file is in it.
_ATTEMPTS = 5


def write_file(snapshot: dict[str, Any], target: Path, aside: Path, mode: int = _MODE) -> None:
    """Writes a snapshot under a hidden name in the folder `aside`, and renames it to `target`. Makes missing folders.

    `mode` has the permissions, of which the process's umask takes some.

    Raises:
        OSError: It could not be written. Nothing is left behind.
    """
    _write(
        lambda file: pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL),
        target,
        aside,
        "write_snapshot",
        "the snapshot was",
        mode,
    )


def write_text_file(text: str, target: Path, operation: str, what: str, mode: int = _MODE) -> None:
    """Writes a text in the same way, in the folder of `target`. `operation` and `what` ("the events were") are for the
    message of a failure.

    Raises:
        OSError: It could not be written. Nothing is left behind, and an existing file is unchanged.
    """
    _write(lambda file: file.write(text.encode()), target, target.parent, operation, what, mode)


def copy_file(source: Path, target: Path, operation: str, what: str) -> None:
    """Writes a copy of a file in the same way.

    Raises:
        OSError: See :func:`write_text_file`.
    """
    content = source.read_bytes()
    _write(lambda file: file.write(content), target, target.parent, operation, what)


def _write(
    write: Callable[[BinaryIO], object], target: Path, aside: Path, operation: str, what: str, mode: int = _MODE
) -> None:
    hidden = aside / f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        try:
            with open(hidden, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                write(file)
            _move(hidden, target)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says what is wrong with the folder
                hidden.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(
            error.errno,
            f"{operation}: {error.strerror}: {what} not written; make room or choose another folder",
            os.fspath(target),
        ) from error


def _move(hidden: Path, target: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(hidden, target)
            return
        except (FileNotFoundError, FileExistsError):  # another process has removed the folder in between
            if attempt == _ATTEMPTS - 1:
                raise
