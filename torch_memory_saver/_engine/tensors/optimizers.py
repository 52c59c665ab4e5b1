"""Find the optimizers that hold the state of an object that a program calls its optimizer.

Libraries wrap optimizers: in a ``torch.optim.Optimizer`` that never calls its base's ``__init__``, in one that has state of
its own, or in an object of another class with a ``step()``. The optimizers inside are found by the attributes ``optimizer``
and ``optim``, and in the lists, tuples and dicts that are attributes. No class is known by name.

An optimizer is refused if its state would certainly be missed: if it calls no hooks and no optimizer is found in it, or if
it keeps another optimizer in an attribute of another name.

This module owns no state. Its functions may be called on any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["find_optimizers"]

#: The attributes in which a wrapper keeps the optimizer that it wraps.
_NAMES = ("optimizer", "optim")


def find_optimizers(torch: Any, given: Any) -> list[Any]:
    """Return the optimizers that hold the state of an optimizer or of an object that wraps some: outer ones first.

    The result is empty if the object is no optimizer and holds none.

    Raises:
        InvalidArgumentError: State would be missed, because an optimizer is wrapped in an unknown way.
    """
    return list({id(each): each for each in _search(torch, given, {})}.values())


def _search(torch: Any, value: Any, known: dict[int, tuple[Any, list[Any]]]) -> list[Any]:
    """Return the optimizers in a value. `known` maps ids to results, and keeps the values alive, so that no id is reused."""
    if id(value) in known:
        return known[id(value)][1]
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    if isinstance(value, (list, tuple, dict)):
        parts: Iterable[Any] = list(value.values()) if isinstance(value, dict) else value
    elif is_optimizer or (callable(getattr(value, "step", None)) and not isinstance(value, type)):
        parts = _parts(value)
    else:
        return []
    calls_hooks = is_optimizer and _calls_hooks(value)
    known[id(value)] = (value, [value] if calls_hooks else [])  # the answer to an inner object that refers to this one
    found = [each for part in parts for each in _search(torch, part, known)]
    if calls_hooks:
        found = _with_outer(torch, value, found)
    elif is_optimizer and not found:
        raise _refusal(value, _hidden(torch, value, found))
    known[id(value)] = (value, found)
    return found


def _parts(value: Any) -> list[Any]:
    """Return the attributes in which an object may keep the optimizers that it wraps."""
    containers = [each for each in _attributes(value).values() if isinstance(each, (list, tuple, dict))]
    return [*(getattr(value, name, None) for name in _NAMES), *containers]


def _with_outer(torch: Any, outer: Any, inner: list[Any]) -> list[Any]:
    """Return the inner optimizers, after the outer one if that has state of its own."""
    if any(each.state is outer.state for each in inner if each is not outer):
        return inner
    hidden = _hidden(torch, outer, inner)
    if hidden:
        raise _refusal(outer, hidden)
    return [outer, *inner]


def _hidden(torch: Any, outer: Any, inner: list[Any]) -> list[str]:
    """Return the attributes that hold an optimizer whose state is in none of those that were found."""
    states = {id(each.state) for each in inner}
    if _calls_hooks(outer):
        states.add(id(outer.state))
    return [
        name
        for name, each in _attributes(outer).items()
        if isinstance(each, torch.optim.Optimizer) and each is not outer and id(getattr(each, "state", None)) not in states
    ]


def _attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return attributes


def _calls_hooks(optimizer: Any) -> bool:
    """Return whether hooks can be registered. An optimizer that has not called its base's ``__init__`` cannot keep them."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def _refusal(optimizer: Any, hidden: list[str]) -> InvalidArgumentError:
    kind = type(optimizer).__name__
    why = (
        f"keeps an optimizer in its attribute {hidden[0]!r}, where manage() does not look: pass that optimizer instead"
        if hidden
        else "has not called Optimizer.__init__() and holds no optimizer that manage() finds, so its steps cannot be "
        "followed: pass the optimizer that it wraps"
    )
    return InvalidArgumentError(
        f"manage: {kind} {why}. Optimizers are found in the attributes 'optimizer' and 'optim', and in lists, tuples and "
        "dicts. Nothing was moved.",
        operation="manage",
    )
