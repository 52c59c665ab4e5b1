"""The tensors of this process on the GPU, and what modules call them, so that memory can be shown by name.

Python's garbage collector lists the objects: all modules, and all tensors that have a Python object. A path begins with the
class of the outermost module. What ``gc.freeze()`` has put aside is not listed; the caller may pass its modules.

Owns no state, and keeps no tensor alive. The thread needs nothing; other threads may make and drop tensors meanwhile.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch_memory_saver._saver.tensor_parts import parts_of

__all__ = ["FoundTensor", "FoundTensors", "extent_of", "find_tensors"]


class FoundTensor(NamedTuple):
    """A tensor: its first byte, the bytes from there to its last one, and what modules call it."""

    address: int
    bytes: int
    dtype: Any
    shape: tuple[int, ...]
    names: tuple[str, ...]
    is_dense: bool  # every byte from the first to the last is an element's


class FoundTensors:
    """Tensors by address."""

    def __init__(self, tensors: Iterable[FoundTensor] = (), hidden_objects: int = 0) -> None:
        self._tensors = sorted(tensors, key=lambda tensor: tensor.address)
        self._addresses = [tensor.address for tensor in self._tensors]
        #: The number of objects that were not searched.
        self.hidden_objects = hidden_objects

    def inside(self, address: int, size: int) -> list[FoundTensor]:
        """Those that begin in a range."""
        return self._tensors[
            bisect.bisect_left(self._addresses, address) : bisect.bisect_left(self._addresses, address + size)
        ]


def find_tensors(torch: Any, modules: Iterable[Any]) -> FoundTensors:
    """The tensors of the process. `modules`: to be searched as well."""
    if torch is None:
        return FoundTensors()
    kinds = (torch.Tensor, torch.nn.Module)
    objects = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    known = {id(each): each for each in objects if issubclass(type(each), torch.nn.Module)}
    known.update((id(module), module) for each in modules for module in each.modules())
    names: dict[int, list[str]] = {}
    tensors = {id(each): each for each in objects if issubclass(type(each), torch.Tensor)}
    for name, tensor in _named(known.values()):
        for part in _flat(torch, tensor):
            names.setdefault(id(part), []).append(name)
            tensors[id(part)] = part
    found = (_describe(torch, tensor, names.get(key, ())) for key, tensor in tensors.items())
    return FoundTensors((each for each in found if each is not None), gc.get_freeze_count())


def _named(modules: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers that the modules hold themselves, with their paths."""
    modules = [*modules]
    parents: dict[int, tuple[Any, str]] = {}
    for module in modules:
        for name, child in _own(module, "_modules"):
            parents.setdefault(id(child), (module, name))
    for module in modules:
        path = _path(module, parents)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in _own(module, kind):
                yield f"{path}.{name}", tensor


def _own(module: Any, kind: str) -> list[tuple[str, Any]]:
    """What a module holds; empty for one that keeps it elsewhere, such as a scripted one."""
    held = vars(module).get(kind)
    return [(str(name), each) for name, each in list(held.items()) if each is not None] if isinstance(held, dict) else []


def _path(module: Any, parents: dict[int, tuple[Any, str]]) -> str:
    names: list[str] = []
    seen = set()
    while id(module) in parents and id(module) not in seen:  # modules may hold each other
        seen.add(id(module))
        module, name = parents[id(module)]
        names.append(name)
    return ".".join([type(module).__name__, *reversed(names)])


def _flat(torch: Any, tensor: Any) -> list[Any]:
    """The tensors that have the storages: itself, or what it is made of."""
    try:
        parts = parts_of(torch, tensor)
    except Exception:  # of a subclass whose methods expect a state that it is not in
        return []
    return [tensor] if parts is None else [part for each in parts for part in _flat(torch, each)]


def extent_of(tensor: Any) -> tuple[int, int] | None:
    """The address of its first byte and the bytes to its last one; None if it has no memory on a GPU."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cuda" or not tensor.numel():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return int(tensor.data_ptr()), (last + 1) * int(tensor.element_size())
    except Exception:  # one without a storage: sparse, of a subclass, or torch.compile's own
        return None


def _describe(torch: Any, tensor: Any, names: Iterable[str]) -> FoundTensor | None:
    extent = extent_of(tensor)
    if extent is None:
        return None
    shape = tuple(int(size) for size in tensor.shape)
    is_dense = extent[1] == int(tensor.numel()) * int(tensor.element_size())
    return FoundTensor(*extent, tensor.dtype, shape, tuple(sorted(names)), is_dense)
