"""Find what loading weights has changed besides the bytes of tensors, because a process that adopts them would lack it.

A model is described before and after the load: the shapes, storages and ties of its tensors, which objects its parameters
and submodules are, the classes of modules, and the attributes and hooks of tensors and modules. Elements of containers are
compared as well, one level deep. Changes inside other objects are not noticed. A description keeps no tensor and no module
in memory.
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
#: The fact about a tensor that names the first tensor with its storage.
_TIE = "tie"
#: The hooks of a tensor, which vars() does not have. Without hooks they are None or empty.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MISSING = object()


def describe(torch: Any, model: Any, operation: str) -> dict[tuple[Any, ...], Any]:
    """Return a description of a module.

    Raises:
        InvalidArgumentError: A tensor cannot be published.
        InvalidStateError: A tensor is paused.
    """
    found = find(torch, model, operation)
    made: dict[tuple[Any, ...], Any] = {}
    first: dict[int, str] = {}
    for name, tensor in found.tensors.items():
        storage = found.shapes[tensor.storage]
        for fact in ("dtype", "shape", "strides"):
            made[name, fact] = str(getattr(tensor, fact))
        made[name, "storage"] = f"element {tensor.offset}, {storage.bytes} bytes, device {found.devices[storage.device]}"
        made[name, _TIE] = first.setdefault(tensor.storage, name)
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_buffers"}
        made.update(_places(torch, path, {"__class__": type(module), **attributes}))
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            hooks = {attribute: getattr(tensor, attribute) or () for attribute in _HOOKS}
            made.update(_places(torch, name, {"requires_grad": tensor.requires_grad, **vars(tensor), **hooks}))
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
    if place[1] == _TIE:
        return f"untied '{name}' from '{one}'" if other == name else f"tied '{name}' to '{other}'"
    if is_of_tensor:
        return f"changed the {place[1]} of '{name}' from {one} to {other}"
    return f"{'replaced' if isinstance(one, weakref.ref) else 'changed'} '{name}'"


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and bool(one == other))
