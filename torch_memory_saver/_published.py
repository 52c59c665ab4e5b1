"""The published names of the shared store: ``names/NAME`` of its folder (``csrc/backup/shared/published.h``).

The file name of a name is percent-encoded, so that a name may have any character. A name exists while it has a manifest. The
core publishes; this module lists, reads and removes. It makes no folder. Any thread may call.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from torch_memory_saver._shared_folder import (
    NAMES,
    OBJECTS,
    directories_in,
    files_in,
    opened,
    opened_store,
    problem_of,
    remove_unlinked,
)
from torch_memory_saver._text import described
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["MANIFEST", "file_name", "published_directories", "published_names", "read_manifest", "remove_published"]

#: The manifest, which is the first file that is removed.
MANIFEST = "manifest.json"
_MAX_NAME_BYTES = 255  # of a file on tmpfs
_SHOWN = 40


def file_name(name: str, operation: str = "") -> str:
    """Return the file name of a published name.

    Raises:
        InvalidArgumentError: The name is no text, is empty, or is too long.
    """
    if not isinstance(name, str) or not name:
        raise _refused(operation, f"the first argument, the name, must be a str that is not empty, not {described(name)}")
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise _refused(operation, f"the name {name!r} is not valid Unicode: {error}") from error
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) > _MAX_NAME_BYTES:
        size = f"percent-encoded it has {len(encoded)} bytes, and may have {_MAX_NAME_BYTES}"
        raise _refused(operation, f"the name {name[:_SHOWN]!r}... is too long: {size}")
    return encoded


def _refused(operation: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{operation}: {reason}" if operation else reason, operation=operation)


def published_directories(root: int) -> Iterator[tuple[str, int]]:
    """Yield the published names of an open store, in the order of their file names, each with its open directory."""
    for encoded, directory in directories_in(root, NAMES):
        if any(name == MANIFEST for name, _ in files_in(directory)):
            yield unquote(encoded), directory


def published_names(path: Path) -> list[str]:
    """Return the published names, sorted. There are none if the folder does not exist.

    Raises:
        OSError: The folder is refused (see ``opened_store`` and ``problem_of``), or cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), opened_store(path) as folder:
        if problem := problem_of(folder):
            raise OSError(errno.EINVAL, problem, os.fspath(folder.path))
        return sorted(name for name, _ in published_directories(folder.descriptor))
    return []


def read_manifest(path: Path, name: str) -> bytes | None:
    """Return the manifest of a name, or None if there is no such name.

    Raises:
        InvalidArgumentError: The name cannot be one.
        OSError: The folder is refused, or the manifest cannot be read.
    """
    encoded = file_name(name)
    with (
        contextlib.suppress(FileNotFoundError),
        _opened_name(path, encoded) as (_, _, directory),
        opened(directory, MANIFEST, os.O_RDONLY) as manifest,
        open(manifest, "rb", closefd=False) as file,
    ):
        return file.read()
    return None


@contextlib.contextmanager
def _opened_name(path: Path, encoded: str) -> Iterator[tuple[int, int, int]]:
    """Open the folder, the directory of names, and that of one name."""
    with (
        opened_store(path) as folder,
        opened(folder.descriptor, NAMES) as names,
        opened(names, encoded) as directory,
    ):
        yield folder.descriptor, names, directory


def remove_published(path: Path, name: str) -> bool:
    """Remove a name, and the objects that nothing else links. Return whether there was such a name.

    The manifest goes first. If the process is killed after that, the next clean-up removes the rest. If another process
    publishes the name at the same time, either its new contents stay, or nothing does.

    Raises:
        InvalidArgumentError: The name cannot be one.
        OSError: The folder is refused, or something cannot be removed.
    """
    encoded = file_name(name)
    with contextlib.suppress(FileNotFoundError), _opened_name(path, encoded) as (root, names, directory):
        os.unlink(MANIFEST, dir_fd=directory)
        with opened(root, OBJECTS) as objects:
            for link, _ in files_in(directory):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(link, dir_fd=directory)
                with contextlib.suppress(FileNotFoundError):
                    remove_unlinked(objects, link)
        with contextlib.suppress(OSError):  # it is that of another publisher now, or a clean-up has removed it
            os.rmdir(encoded, dir_fd=names)
        return True
    return False
