"""Functions that ``torch.compile`` does not trace.

Dynamo would otherwise trace into this package and warn about the native core, which it cannot trace. The mark is that of
``torch.compiler.disable``; the decorator itself would import much of PyTorch. Dynamo breaks the graph at such a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["eager", "eager_methods"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def eager(function: _Function) -> _Function:
    """Marks a function."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "torch_memory_saver cannot be part of a graph: use it outside of the function"
    return function


def eager_methods(cls: _Class) -> _Class:
    """Marks every method and property that a class itself defines."""
    for attribute in vars(cls).values():
        functions = (attribute.fget, attribute.fset) if isinstance(attribute, property) else (attribute,)
        for function in functions:
            if isinstance(function, type(eager)):
                eager(function)
    return cls
