"""Keeps torch.compile out of the implementations here: it would compile these Python functions along with the program's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["eager"]


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
