"""The contents of the shared store: its objects, each with the number of its holders, and the published names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver._files import can_lock
from torch_memory_saver._published import MANIFEST, published_directories
from torch_memory_saver._shared_folder import (
    HOLDERS,
    LOCK,
    OBJECTS,
    directories_in,
    files_in,
    is_object,
    is_part,
    opened,
    opened_store,
    problem_of,
)
from torch_memory_saver._text import counted
from torch_memory_saver.node_store import manifest

__all__ = ["Contents", "PublishedName", "StoredObject", "read_store"]

#: Device and inode of a file. Every link to an object has the same ones.
_Identity = tuple[int, int]


@dataclass(frozen=True)
class StoredObject:
    """One object.

    Attributes:
        name: Name of the object, which follows from its contents.
        bytes: Size of the object.
        holders: Number of live processes that have a link to it.
        listed: Whether the folder ``objects`` has it. Otherwise no other process finds it, and its memory is released with
            its last link.
    """

    name: str
    bytes: int
    holders: int
    listed: bool


@dataclass(frozen=True)
class PublishedName:
    """Weights that are published under a name.

    Attributes:
        name: The name.
        bytes: Bytes of its objects, which processes may hold as well.
        objects: Number of its objects.
        published: Time at which the manifest was written, in seconds since 1970.
        identity: Text that says from what the weights were made; "" if the manifest is damaged.
        damage: Reason why no process can adopt the weights, or "".
    """

    name: str
    bytes: int
    objects: int
    published: float
    identity: str
    damage: str


@dataclass(frozen=True)
class Contents:
    """The contents of the folder `path`.

    Attributes:
        objects: Objects in the order of their names, each of them once.
        names: Published names.
        holders: Number of live processes that use the store.
        dead: Number of holders that dead processes have left.
        unfinished: Number of objects that have been begun and have no name yet.
        unfinished_bytes: Bytes of these files.
        problem: Reason why no process can use the store, or "".
    """

    path: Path
    objects: tuple[StoredObject, ...]
    names: tuple[PublishedName, ...]
    holders: int
    dead: int
    unfinished: int
    unfinished_bytes: int
    problem: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all objects. An object counts once, however many processes and names link it."""
        return sum(found.bytes for found in self.objects) + self.unfinished_bytes


@dataclass
class _Counted:
    """An object while it is counted."""

    name: str
    bytes: int
    holders: int = 0
    listed: bool = False


def read_store(path: Path) -> Contents:
    """Read the folder. Changes nothing.

    Raises:
        OSError: The folder does not exist, is refused (see ``opened_store``), or cannot be read.
    """
    with opened_store(path) as folder:
        found, parts = _read_objects(folder.descriptor)
        live = dead = 0
        for name, holder in directories_in(folder.descriptor, HOLDERS):
            if name.startswith("."):  # its process is starting
                continue
            alive = _is_alive(holder)
            live, dead = live + alive, dead + (not alive)
            for each in _linked(found, holder):
                each.holders += alive
        names = []
        for name, links in published_directories(folder.descriptor):
            with contextlib.suppress(FileNotFoundError):  # it was removed
                names.append(_published(found, name, links))
        # A writer gives an object its name before it removes the name of the unfinished file.
        unfinished = [size for identity, size in parts.items() if identity not in found]
        objects = tuple(StoredObject(**vars(each)) for each in sorted(found.values(), key=lambda each: each.name))
        return Contents(folder.path, objects, tuple(names), live, dead, len(unfinished), sum(unfinished), problem_of(folder))


def _published(found: dict[_Identity, _Counted], name: str, directory: int) -> PublishedName:
    links = list(_linked(found, directory))
    with opened(directory, MANIFEST, os.O_RDONLY) as file, open(file, "rb", closefd=False) as text:
        published, identity, damage = os.fstat(file).st_mtime, "", ""
        try:
            kept = manifest.read(text.read())
            # A process that adopts the weights finds an object only where the folder lists it.
            sizes = {each.name: each.bytes for each in found.values() if each.listed}
            identity, objects = kept.identity, {*kept.objects}
            missing = len(objects - sizes.keys())
            if missing:
                damage = f"of its {counted(len(objects), 'object')} {missing} {'is' if missing == 1 else 'are'} missing"
            else:
                damage = kept.damage(sizes)
        except manifest.ManifestError as error:
            damage = str(error)
    return PublishedName(name, sum(each.bytes for each in links), len(links), published, identity, damage)


def _read_objects(root: int) -> tuple[dict[_Identity, _Counted], dict[_Identity, int]]:
    """Return the objects that the folder lists, and the sizes of unfinished ones."""
    found: dict[_Identity, _Counted] = {}
    parts: dict[_Identity, int] = {}
    with contextlib.suppress(FileNotFoundError), opened(root, OBJECTS) as objects:
        for name, status in files_in(objects):
            if is_object(name, status):
                found[_identity(status)] = _Counted(name, status.st_size, listed=True)
            elif is_part(name, status):
                parts[_identity(status)] = status.st_size
    return found, parts


def _linked(found: dict[_Identity, _Counted], directory: int) -> Iterator[_Counted]:
    """Yield the objects that a directory links. Objects that the folder does not list are added to `found`."""
    for name, status in files_in(directory):
        if is_object(name, status):
            yield found.setdefault(_identity(status), _Counted(name, status.st_size))


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _is_alive(holder: int) -> bool:
    """Return whether the process of a holder lives. It keeps a file of the holder locked, and the kernel releases the lock
    when it ends."""
    try:
        with opened(holder, LOCK, os.O_RDONLY) as lock:
            return not can_lock(lock)
    except FileNotFoundError:
        return False
