"""Shared by PyTorch's behaviours: a device, and descriptions of an action's effect that are equal on every machine."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import sympy  # noqa: F401 - an operator of the simulated GPU imports it; so it is imported once for all forked processes
import torch
from table import Observations

__all__ = ["World", "attempt", "described", "during_capture", "each"]

#: Text that differs between runs: addresses, and the source location of an assertion in PyTorch.
_VARYING = re.compile(r"0x[0-9a-f]+|\(?[\w/.-]+\.(?:cpp|cu|cuh|h):\d+\)?")
_LONGEST = 160


class World:
    """The device on which behaviours run: the first one."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        gc.freeze()  # start() need not look at the objects of modules

    def start(self) -> None:
        gc.collect()
        torch.cuda.set_device(0)
        torch.cuda.empty_cache()
        torch.manual_seed(0)

    def is_usable(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True


def described(value: Any) -> Any:
    """A description of a result. For a tensor it has everything except the values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} strides {list(value.stride())} on {value.device}".replace("torch.", "")
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def attempt(action: Callable[[], Any]) -> Observations:
    """Runs an action and waits for the device. Returns a description of the result or of the exception."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = action()
            torch.cuda.synchronize()
        except Exception as error:
            return {"raises": type(error).__name__, "message": _first_line(error)}
    seen: Observations = {"returns": described(result)}
    if warned:
        seen["warns"] = sorted({each.category.__name__ for each in warned})
    return seen


def each(actions: dict[str, Callable[[], Any]]) -> Observations:
    return {label: attempt(action) for label, action in actions.items()}


def during_capture(action: Callable[[], Any]) -> Observations:
    """Runs an action while its stream is captured. Returns its effect and that of the end of the capture. The process must
    not be used afterwards, because PyTorch's allocator may remain in the capture."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    seen: Observations = {}
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            seen["returns"] = described(action())
        except Exception as error:
            seen |= {"raises": type(error).__name__, "message": _first_line(error)}
        try:
            graph.capture_end()
            seen["end"] = "a graph"
        except Exception as error:
            seen["end"] = f"{type(error).__name__}: {_first_line(error)}"
    return seen


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return _VARYING.sub("...", lines[0]).strip()[:_LONGEST]
