"""Find the storages that live graphs have saved for a backward.

Autograd has no list of its graphs. A graph is found by a tensor or a node of it that has a Python object, because Python's
garbage collector lists these objects. From there all nodes are visited. The saved tensors of a node are read without
unpacking them, so no hook of the program runs. Nodes whose backward has run hold nothing any more.

Three things are not found: graphs that only C++ code holds, or objects that ``gc.freeze()`` has put aside; tensors that a
:class:`torch.autograd.Function` keeps as attributes of its context; and what a hook has packed into an object of its own.
Nothing is found with a PyTorch whose ``SavedTensor`` has no ``data`` (2.11 has it). A saved tensor that is not found keeps
its contents when it moves, because the graph has its storage.

This module owns no state and keeps no tensor alive. Its functions may be called on any thread.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch_memory_saver._engine.tensors.lookup import storages_of

__all__ = ["find_saved_storages"]

#: The prefix of the attributes of a node that hold what it has saved, without unpacking it.
_RAW = "_raw_saved_"
#: The attribute that all nodes have, of C++ and of Python functions.
_NODE = "next_functions"


def find_saved_storages(torch: Any, results: Iterable[Any] | None = None) -> dict[int, str]:
    """Return the storages that are saved for a backward, each with the name of a node that has saved it.

    A storage is named by the address of its record (``_cdata``). With `results` only the graphs that have made these tensors
    are visited.
    """
    saved: dict[int, str] = {}
    names: dict[type, list[str]] = {}
    for node in _nodes(_roots(torch, gc.get_objects() if results is None else results)):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith(_RAW)]
        for name in names[kind]:
            for tensor in _saved_by(torch, node, name):
                for storage in _storages(torch, tensor):
                    saved.setdefault(storage._cdata, kind.__name__)
    return saved


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graphs that these nodes belong to, each once."""
    seen: dict[int, Any] = {}  # keeps the nodes alive, so that no id is reused
    waiting = [node for node in roots if seen.setdefault(id(node), node) is node]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in _next(node):
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                waiting.append(following)


def _roots(torch: Any, objects: Iterable[Any]) -> list[Any]:
    """Return the nodes among Python objects, and those that have made a tensor among them."""
    kinds: dict[type, bool | None] = {}  # whether objects of a type are tensors or nodes; None: neither
    roots: list[Any] = []
    for each in objects:
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = True if issubclass(kind, torch.Tensor) else False if hasattr(kind, _NODE) else None
        is_tensor = kinds[kind]
        if is_tensor is None:
            continue
        node = _maker_of(torch, each) if is_tensor else each
        if node is not None:
            roots.append(node)
    return roots


def _next(node: Any) -> tuple[tuple[Any, int], ...]:
    """Return the nodes that a node passes gradients to. A Function that is part of no graph has none."""
    try:
        following: tuple[tuple[Any, int], ...] = node.next_functions
    except RuntimeError:
        return ()
    return following


def _maker_of(torch: Any, tensor: Any) -> Any:
    """Return the node that has made a tensor, or None. A subclass of tensors may refuse access to it."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.grad_fn
    except (RuntimeError, AttributeError):
        return None


def _saved_by(torch: Any, node: Any, name: str) -> Iterator[Any]:
    """Yield the tensors that one attribute of a node holds, and those that a hook has packed as such or in a tuple."""
    held: Any = ()
    with contextlib.suppress(RuntimeError):  # the backward has run
        held = getattr(node, name)
    for each in held if isinstance(held, (tuple, list)) else (held,):
        data = getattr(each, "data", None)
        for part in data if isinstance(data, (tuple, list)) else (data,):
            if isinstance(part, torch.Tensor):
                yield part


def _storages(torch: Any, tensor: Any) -> Iterator[Any]:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without a storage shares none that is moved
        yield from storages_of(torch, [tensor])
