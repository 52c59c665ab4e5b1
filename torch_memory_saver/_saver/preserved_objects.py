"""The tensors and modules that are registered for preserve(), held weakly.

The lock of :class:`PreservedObjects` guards what is registered, and nothing else. Weak references are resolved without it:
the last reference to a tensor may be dropped then, which frees memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

__all__ = ["PreservedObjects"]


class _Module(NamedTuple):
    #: Returns the module, or None once it has died.
    find: Callable[[], Any]
    #: Its parameters as well as its buffers.
    parameters: bool


class _Group:
    """The objects of one tag, by their ids."""

    def __init__(self) -> None:
        #: Each returns its tensor, or None once that has died.
        self.tensors: dict[int, Callable[[], Any]] = {}
        self.modules: dict[int, _Module] = {}

    def copy(self) -> _Group:
        copied = _Group()
        copied.tensors, copied.modules = self.tensors.copy(), self.modules.copy()
        return copied

    def add(self, torch: Any, what: Any, parameters: bool) -> None:
        if isinstance(what, torch.Tensor):
            from torch.utils.weak import TensorWeakRef

            self.tensors[id(what)] = TensorWeakRef(what)
        else:
            self.modules[id(what)] = _Module(weakref.ref(what), parameters)

    def remove(self, ids: Container[int]) -> None:
        self.tensors = {key: each for key, each in self.tensors.items() if key not in ids}
        self.modules = {key: each for key, each in self.modules.items() if key not in ids}

    def find_tensors(self) -> tuple[list[Any], _Group]:
        """The tensors of the objects that are alive, and the objects that are not."""
        found = [find() for find in self.tensors.values()]
        tensors = [tensor for tensor in found if tensor is not None]
        dead = _Group()
        if len(tensors) < len(found):
            dead.tensors = {
                key: find for (key, find), tensor in zip(self.tensors.items(), found, strict=True) if tensor is None
            }
        members: list[Any] = []
        for key, each in self.modules.items():
            module = each.find()
            if module is None:
                dead.modules[key] = each
            else:
                _add_members_of(module, each.parameters, members)
        tensors += [member for member in members if member is not None]
        return tensors, dead

    def forget(self, dead: _Group) -> None:
        """A new object may have the id of a dead one. It stays."""
        for tensor, find in dead.tensors.items():
            if self.tensors.get(tensor) is find:
                del self.tensors[tensor]
        for key, module in dead.modules.items():
            if self.modules.get(key) is module:
                del self.modules[key]

    def __bool__(self) -> bool:
        return bool(self.tensors or self.modules)


def _add_members_of(module: Any, parameters: bool, members: list[Any]) -> None:
    """Adds the buffers of a module and its submodules, and on request the parameters; None for each that is not set.
    `module.buffers()` would name each of them, which takes longer than everything else that a pause does here."""
    for each in module.modules():
        members.extend(each._buffers.values())
        if parameters:
            members.extend(each._parameters.values())


class PreservedObjects:
    """What is registered in this process, by tag (None: any)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str | None, _Group] = {}

    def add(self, torch: Any, what: Iterable[Any], tag: str | None, parameters: bool) -> list[Any]:
        """Registers tensors and modules. Returns the tensors that they stand for now."""
        added = _Group()
        for each in what:
            added.add(torch, each, parameters)
        with self._lock:
            group = self._groups.setdefault(tag, _Group())
            group.tensors.update(added.tensors)
            group.modules.update(added.modules)
        return added.find_tensors()[0]

    def remove(self, ids: Container[int]) -> None:
        """Removes the objects with these ids, with every tag."""
        with self._lock:
            for group in self._groups.values():
                group.remove(ids)

    def find_tensors(self) -> dict[str | None, list[Any]]:
        """The tensors that the registered objects stand for now, by tag. Forgets objects that have died."""
        with self._lock:
            groups = {tag: group.copy() for tag, group in self._groups.items()}
        found = {tag: group.find_tensors() for tag, group in groups.items()}
        with self._lock:
            for tag, (_, dead) in found.items():
                self._groups[tag].forget(dead)
        return {tag: tensors for tag, (tensors, _) in found.items() if tensors}

    def __bool__(self) -> bool:
        """Whether anything is registered. What has died counts until it is next looked for."""
        return any(list(self._groups.values()))  # a copy: other threads may add to it
