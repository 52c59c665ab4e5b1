"""Keeps torch.compile out of the implementations here: it would compile these Python functions along with the program's.

And keeps it from being imported, which takes a second, before the program itself uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

__all__ = ["eager", "postpone_compiler"]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run without torch.compile's frame evaluation. Its own decorator for that would import the compiler."""
    evaluation = torch._C._dynamo.eval_frame

    def run(*arguments: Any, **keywords: Any) -> Any:
        before = evaluation.set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            evaluation.set_eval_frame(before)

    _skip(run.__code__)
    return run


def _skip(code: Any) -> None:
    """Has torch.compile's frame evaluation pass over a function; older releases of PyTorch name that differently."""
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "skip_code"):
        evaluation.skip_code(code)
        return
    skip = evaluation._FrameAction.SKIP
    evaluation.set_code_exec_strategy(code, evaluation._FrameExecStrategy(skip, skip))


def postpone_compiler() -> None:
    """Has PyTorch's meta implementations import the compiler only where the program has imported it.

    They are wrapped by ``torch._compile._disable_dynamo``. Its wrapper imports the compiler at the first call, to keep it
    out of the wrapped function, and stores the result as an attribute of that function.
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
    """Collects the functions with this code among those that a function has been made of."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    if function.__code__ is code:
        found[id(function)] = function
    for cell in function.__closure__ or ():
        _find(cell.cell_contents, code, found, seen)


def _postpone(wrapper: FunctionType) -> None:
    place = wrapper.__code__.co_freevars.index("fn")
    wrapped: Any = (wrapper.__closure__ or ())[place].cell_contents

    def run(*arguments: Any, **keywords: Any) -> Any:
        if hasattr(sys.modules.get("torch._dynamo"), "disable"):
            del wrapped.__dynamo_disable
            return wrapper(*arguments, **keywords)  # which makes PyTorch's own
        return wrapped(*arguments, **keywords)

    wrapped.__dynamo_disable = run
