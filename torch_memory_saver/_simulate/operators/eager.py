"""Excludes the implementations here from torch.compile, which would compile them together with the program's functions.

Also delays the import of the compiler, which takes a second, until the program uses it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

__all__ = ["eager", "postpone_compiler"]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without torch.compile's frame evaluation. PyTorch's decorator for this would import the compiler."""
    evaluation = torch._C._dynamo.eval_frame

    def run(*arguments: Any, **keywords: Any) -> Any:
        before = evaluation.set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            evaluation.set_eval_frame(before)

    skip = evaluation._FrameAction.SKIP
    evaluation.set_code_exec_strategy(run.__code__, evaluation._FrameExecStrategy(skip, skip))
    return run


def postpone_compiler() -> None:
    """Stops PyTorch's meta implementations from importing the compiler before the program has imported it.

    ``torch._compile._disable_dynamo`` wraps them. At its first call, the wrapper imports the compiler to exclude the wrapped
    function from compilation, and stores the resulting function in an attribute of the wrapped function.
    """
    from torch._compile import _disable_dynamo
    from torch._decomp import global_decomposition_table

    wrapper: Any = _disable_dynamo(lambda: None)
    wrappers: dict[int, FunctionType] = {}
    seen: set[int] = set()
    for table in global_decomposition_table.values():
        for function in table.values():
            _find(function, wrapper.__code__, wrappers, seen)
    for each in wrappers.values():
        _postpone(each)


def _find(function: Any, code: Any, found: dict[int, FunctionType], seen: set[int]) -> None:
    """Collects the functions with this code among the function and the functions in its closure, recursively."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    if function.__code__ is code:
        found[id(function)] = function
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            _find(cell.cell_contents, code, found, seen)


def _postpone(wrapper: FunctionType) -> None:
    place = wrapper.__code__.co_freevars.index("fn")
    wrapped: Any = (wrapper.__closure__ or ())[place].cell_contents

    def run(*arguments: Any, **keywords: Any) -> Any:
        if hasattr(sys.modules.get("torch._dynamo"), "disable"):
            wrapped.__dict__.pop("__dynamo_disable", None)  # another thread may have removed it
            return wrapper(*arguments, **keywords)  # creates PyTorch's own function
        return wrapped(*arguments, **keywords)

    wrapped.__dynamo_disable = run
