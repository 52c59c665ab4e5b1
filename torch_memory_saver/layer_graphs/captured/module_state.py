"""The state of a captured module: the properties that must not change, and the attributes that the module's code sets.

The module's parts, their modes and hooks, and the addresses of its tensors must not change.

A replay runs no Python, so it sets no attribute on modules or on the objects that modules hold. Tensors among the attributes
become results of the graph, and are set after each replay. Any other attribute would keep its value: such changes are found
here and explained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Attributes", "Changes", "ModuleState", "find_hook", "one_gpu"]

#: The attributes of a module that have its hooks, and the methods that register them.
_HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}
#: Types whose values are compared, and not only their identity.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
#: Types of objects whose attributes are not inspected.
_OPAQUE = (torch.Tensor, torch.nn.Module, FunctionType, MethodType, ModuleType, type)


def find_hook(parts: Iterable[tuple[str, Any]]) -> str | None:
    """Return a description of the first hook of these named modules, or None."""
    for name, part in parts:
        if part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks:
            registered = next(registers for attribute, registers in _HOOKS.items() if getattr(part, attribute))
            return f"module {name or 'itself'} has a hook ({registered})"
    return None


def one_gpu(owners: str, devices: set[Any]) -> Any:
    """Return the one GPU of these devices.

    Raises:
        InvalidArgumentError: The devices are not one GPU.
    """
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise InvalidArgumentError(
            f"{owners} are on {', '.join(sorted(map(str, devices))) or 'no device'}: they must be on one GPU"
        )
    return next(iter(devices))


class ModuleState:
    """The state of a module at the time when this object was made.

    Attributes:
        parts: The module and all modules in it, by name.
    """

    def __init__(self, module: Any) -> None:
        self.parts: dict[str, Any] = dict(module.named_modules())
        self._training = [part.training for part in self.parts.values()]
        self._tensors = self._look()

    def _look(self) -> dict[tuple[str, str], tuple[int, bool]]:
        """Return the addresses of parameters and buffers, and the identities of child modules.

        The address of each parameter and buffer comes with whether the tensor needs a gradient.
        """
        found = {}
        for name, part in self.parts.items():
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        found[name, key] = (tensor.data_ptr(), tensor.requires_grad)
            for key, child in part._modules.items():
                found[name, key] = (id(child), True)
        return found

    def changed(self) -> list[str]:
        """Return the names of parameters, buffers and modules that are other objects now, or lie at other addresses.

        A parameter whose requires_grad has changed is included.
        """
        now = self._look()
        if now == self._tensors:
            return []
        keys = now.keys() | self._tensors.keys()
        return sorted(".".join(filter(None, key)) for key in keys if now.get(key) != self._tensors.get(key))

    def other_mode(self) -> str | None:
        """Return the name of the first module whose mode, train() or eval(), has changed, or None."""
        for (name, part), training in zip(self.parts.items(), self._training, strict=True):
            if part.training != training:
                return name or "itself"
        return None


class _Attribute(NamedTuple):
    holder: Any
    name: str
    value: Any
    size: int | None  # length of a list, dict or set, which changes in place


class Changes(NamedTuple):
    """The attributes that code has set.

    Attributes:
        tensors: Tensors, containers of tensors, and None, by the attribute's path in the layer.
        others: Changes that a replay cannot make, in words, by path.
    """

    tensors: dict[str, Any]
    others: dict[str, str]


class Attributes:
    """The attributes of a module, of its submodules, and of the objects that these hold, at one time.

    Parameters, buffers and submodules are not included.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._found = dict(_attributes(module))

    def changes(self) -> Changes:
        """Return the attributes that have been set since."""
        tensors: dict[str, Any] = {}
        others: dict[str, str] = {}
        for path, now in _attributes(self._module):
            before = self._found.get(path)
            if before is not None and before.value is now.value:
                if before.size != now.size:
                    others[path] = f"changes its length from {before.size} to {now.size}"
            elif now.value is None or _has_tensor(now.value):
                tensors[path] = now.value
            elif before is None or not _equal(before.value, now.value):
                others[path] = (
                    f"did not exist before and is now {_text(now.value)}"
                    if before is None
                    else f"changes from {_text(before.value)} to {_text(now.value)}"
                )
        return Changes(tensors, others)

    def restore(self) -> None:
        """Restore attributes that are or were tensors and have been set since.

        They are restored because they would keep a graph's memory. Numbers and other objects stay, so code that prepares
        something at its first call need not do so again.
        """
        for path, now in list(_attributes(self._module)):
            before = self._found.get(path)
            if before is not None and before.value is now.value:
                continue
            if before is None and _has_tensor(now.value):
                delattr(now.holder, now.name)
            elif before is not None and (_has_tensor(now.value) or _has_tensor(before.value)):
                setattr(now.holder, now.name, before.value)

    def set(self, values: Mapping[str, Any]) -> None:
        """Set attributes by their paths.

        Raises:
            AttributeError: The object that had the attribute is gone.
        """
        for path, value in values.items():
            holder_path, _, name = path.rpartition(".")
            setattr(functools.reduce(getattr, holder_path.split(".") if holder_path else [], self._module), name, value)

    def different(self) -> dict[str, str]:
        """Return how numbers, strings and tensors differ from their earlier values, in words, by path.

        Attributes that are new or were None are not included.
        """
        found: dict[str, str] = {}
        for path, now in _attributes(self._module):
            before = self._found.get(path)
            if before is None or before.value is now.value or before.value is None:
                continue
            if isinstance(before.value, torch.Tensor) and isinstance(now.value, torch.Tensor):
                if before.value.data_ptr() != now.value.data_ptr():
                    found[path] = "has been replaced by another tensor"
            elif isinstance(before.value, _PLAIN) and not _equal(before.value, now.value):
                found[path] = f"has changed from {_text(before.value)} to {_text(now.value)}"
        return found


def _attributes(module: Any) -> Iterator[tuple[str, _Attribute]]:
    for prefix, part in module.named_modules():
        for name, value in _own(part):
            path = f"{prefix}.{name}" if prefix else name
            yield path, _Attribute(part, name, value, _size(value))
            if hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
                for inner, held in list(vars(value).items()):
                    yield f"{path}.{inner}", _Attribute(value, inner, held, _size(held))


def _own(module: Any) -> list[tuple[str, Any]]:
    """Return a module's attributes without those that every module has."""
    return [(name, value) for name, value in vars(module).items() if name not in _names_of_every_module()]


@functools.cache
def _names_of_every_module() -> frozenset[str]:
    return frozenset(vars(torch.nn.Module()))


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) else None


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(value))


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
