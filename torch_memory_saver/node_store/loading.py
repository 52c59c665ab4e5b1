"""What loading weights has changed besides the bytes of tensors, because a process that adopts them would lack it.

A model is described before and after the load: the shapes and the storages of its tensors, which objects its parameters and
submodules are, and the attributes of both. Elements of containers are compared as well, one level deep. Changes inside
other objects are not noticed. A description keeps no tensor and no module in memory.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from .tensors import find

__all__ = ["changed", "describe"]

#: Types whose equal values are interchangeable. All other values are compared by identity.
_VALUES = (int, float, complex, str, bytes, types.MethodType)


def describe(torch: Any, model: Any, operation: str) -> dict[tuple[Any, ...], Any]:
    """Return a description of a module.

    Raises:
        InvalidArgumentError: A tensor cannot be published.
        InvalidStateError: A tensor is paused.
    """
    found = find(torch, model, operation)
    made: dict[tuple[Any, ...], Any] = {}
    for name, tensor in found.tensors.items():
        storage = found.shapes[tensor.storage]
        made[name, "shape"] = f"{tensor} {storage.bytes} {storage.device}"
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_buffers"}
        made.update(_places(torch, path, attributes))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        made.update(_places(torch, name, vars(parameter)))
    return made


def _places(torch: Any, path: str, attributes: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in attributes.items():
        elements: list[tuple[Any, Any]]
        if isinstance(value, Mapping):
            elements = list(value.items())
        elif isinstance(value, (list, tuple)):
            elements = list(enumerate(value))
        elif isinstance(value, (set, frozenset)):
            elements = [(element, element) for element in value]
        else:
            elements = [("", value)]
        for key, element in elements:
            can_go = isinstance(element, (torch.Tensor, torch.nn.Module))
            yield (path, name, key), weakref.ref(element) if can_go else element


def changed(before: Mapping[tuple[Any, ...], Any], after: Mapping[tuple[Any, ...], Any]) -> str:
    """Return the name of the first thing that differs between two descriptions, or ""."""
    missing = object()
    for place in (*before, *after):
        if not _is_same(before.get(place, missing), after.get(place, missing)):
            return ".".join(part for part in map(str, place) if part not in ("", "_parameters", "_modules"))
    return ""


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and bool(one == other))
