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
#: The place of a fact about a tensor is its name and the fact. Other places have three parts.
_PARTS_OF_TENSOR = 2
_MISSING = object()


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
        for fact in ("dtype", "shape", "strides"):
            made[name, fact] = str(getattr(tensor, fact))
        made[name, "storage"] = (
            f"number {tensor.storage}, element {tensor.offset}, {storage.bytes} bytes, device {storage.device}"
        )
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
    """Return what the first difference between two descriptions is and what to do about it, or "". It follows "has"."""
    for place in (*before, *after):
        one, other = before.get(place, _MISSING), after.get(place, _MISSING)
        if not _is_same(one, other):
            advice = ("call train()" if other is True else "call eval()") if place[1] == "training" else "do that"
            return f"{_difference(place, one, other)}, which adopting would not: {advice} after adopt_or_load()"
    return ""


def _difference(place: tuple[Any, ...], one: Any, other: Any) -> str:
    is_of_tensor = len(place) == _PARTS_OF_TENSOR
    parts = place[:1] if is_of_tensor else place
    name = ".".join(part for part in map(str, parts) if part not in ("", "_parameters", "_modules"))
    if one is _MISSING or other is _MISSING:
        return f"{'added' if one is _MISSING else 'removed'} '{name}'"
    if is_of_tensor:
        return f"changed the {place[1]} of '{name}' from {one} to {other}"
    return f"{'replaced' if isinstance(one, weakref.ref) else 'changed'} '{name}'"


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and bool(one == other))
