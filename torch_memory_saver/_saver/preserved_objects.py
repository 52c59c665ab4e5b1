"""The storages and modules that are registered for preserve(), held weakly.

A tensor is registered by its storage, because the tensor object may be temporary: a view, ``p.data``, ``p.detach()`` and the
values of ``state_dict()`` die at once, while the storage lives on. ``StorageWeakRef`` refers to PyTorch's storage itself and
not to the Python object that stands for it. The key is the address of the storage's record. The reference keeps that address
from being used again, so a new storage never takes over a registration. It does not keep the memory.

The lock of :class:`PreservedObjects` guards what is registered, and nothing else. Weak references are resolved without it:
the last reference to a storage may be dropped then, which frees memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch_memory_saver._saver.tensor_parts import storages_of

__all__ = ["PreservedObjects"]


class _Module(NamedTuple):
    #: Returns the module, or None once it has died.
    find: Callable[[], Any]
    #: Its parameters as well as its buffers.
    parameters: bool


class _Group:
    """The storages and modules of one tag, by their keys: the address of a storage's record, the id of a module."""

    def __init__(self) -> None:
        #: A StorageWeakRef for each storage.
        self.storages: dict[int, Any] = {}
        self.modules: dict[int, _Module] = {}

    def copy(self) -> _Group:
        copied = _Group()
        copied.storages, copied.modules = self.storages.copy(), self.modules.copy()
        return copied

    def add(self, torch: Any, what: Any, parameters: bool) -> None:
        if isinstance(what, torch.Tensor):
            from torch.multiprocessing.reductions import StorageWeakRef

            for storage in storages_of(torch, [what]):
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = reference
        else:
            self.modules[id(what)] = _Module(weakref.ref(what), parameters)

    def remove(self, other: _Group) -> None:
        """Removes what is registered in another group."""
        self.storages = {key: each for key, each in self.storages.items() if key not in other.storages}
        self.modules = {key: each for key, each in self.modules.items() if key not in other.modules}

    def find_storages(self, torch: Any, dead: _Group) -> Iterator[Any]:
        """Yields the storages that the group stands for now, one at a time, so that few live at once. Adds what has died to
        `dead` on the way."""
        find = torch.UntypedStorage._new_with_weak_ptr
        for key, reference in self.storages.items():
            storage = find(key)
            if storage is None:
                dead.storages[key] = reference
            else:
                yield storage
        members: list[Any] = []
        for key, each in self.modules.items():
            module = each.find()
            if module is None:
                dead.modules[key] = each
            else:
                _add_members_of(module, each.parameters, members)
        yield from storages_of(torch, [member for member in members if member is not None])

    def forget(self, dead: _Group) -> None:
        """Removes what has died. A new module may have the id of a dead one. It stays."""
        for key, reference in dead.storages.items():
            if self.storages.get(key) is reference:
                del self.storages[key]
        for key, module in dead.modules.items():
            if self.modules.get(key) is module:
                del self.modules[key]

    def __bool__(self) -> bool:
        return bool(self.storages or self.modules)


def _add_members_of(module: Any, parameters: bool, members: list[Any]) -> None:
    """Adds the buffers of a module and its submodules, and on request the parameters; None for each that is not set.
    `module.buffers()` would name each of them, which takes longer than everything else that a pause does here."""
    for each in module.modules():
        members.extend(each._buffers.values())
        if parameters:
            members.extend(each._parameters.values())


def _group_of(torch: Any, what: Iterable[Any], parameters: bool) -> _Group:
    group = _Group()
    for each in what:
        group.add(torch, each, parameters)
    return group


class PreservedObjects:
    """What is registered in this process, by tag (None: any)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str | None, _Group] = {}

    def add(self, torch: Any, what: Iterable[Any], tag: str | None, parameters: bool) -> list[Any]:
        """Registers tensors and modules. Returns the storages that they stand for now.

        Raises:
            InvalidArgumentError: A tensor of a layout whose parts are not known. Nothing was registered.
        """
        added = _group_of(torch, what, parameters)
        with self._lock:
            group = self._groups.setdefault(tag, _Group())
            group.storages.update(added.storages)
            group.modules.update(added.modules)
        return list(added.find_storages(torch, _Group()))

    def remove(self, torch: Any, what: Iterable[Any]) -> None:
        """Removes the storages of tensors, and modules, with every tag.

        Raises:
            InvalidArgumentError: A tensor of a layout whose parts are not known.
        """
        removed = _group_of(torch, what, False)
        with self._lock:
            for group in self._groups.values():
                group.remove(removed)

    def find_storages(self, torch: Any) -> Iterator[tuple[str | None, Iterator[Any]]]:
        """Yields each tag with the storages that its registered objects stand for now. Forgets objects that have died once
        the storages of their tag were consumed."""
        with self._lock:
            groups = {tag: group.copy() for tag, group in self._groups.items()}
        for tag, group in groups.items():
            dead = _Group()
            yield tag, group.find_storages(torch, dead)
            if dead:
                with self._lock:
                    self._groups[tag].forget(dead)

    def __bool__(self) -> bool:
        """Whether anything is registered. Dead objects count until the next look for them."""
        return any(list(self._groups.values()))  # a copy: other threads may add to it
