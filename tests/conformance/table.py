"""The table of behaviours. A suite is a folder: its subject, which is what behaviours are given, and the behaviours."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

Observations = dict[str, Any]


class Subject(Protocol):
    """The object that behaviours get."""

    def start(self) -> None:
        """Prepares for a behaviour that shares its process with others."""

    def is_usable(self) -> bool:
        """Whether another behaviour can follow in this process."""


#: Folder of a suite -> module and class of its subject.
SUITES = {"driver": ("gpu", "Gpu"), "pytorch": ("world", "World")}

Function = TypeVar("Function", bound=Callable[[Any], Observations])


@dataclass(frozen=True)
class Behaviour:
    name: str
    function: Callable[[Any], Observations]
    own_process: bool
    devices: int


TABLE: dict[str, Behaviour] = {}


@overload
def behaviour(function: Function) -> Function: ...
@overload
def behaviour(*, own_process: bool = False, devices: int = 1) -> Callable[[Function], Function]: ...
def behaviour(
    function: Function | None = None, *, own_process: bool = False, devices: int = 1
) -> Function | Callable[[Function], Function]:
    """Enters a function into the table.

    Args:
        own_process: The process is new, the subject is not started, and the function may leave any state behind. Otherwise
            the subject is started, and the function must leave no error behind.
        devices: How many GPUs it needs.
    """

    def enter(function: Function) -> Function:
        name = f"{function.__module__.removeprefix('on_')}.{function.__name__}"
        if name in TABLE:
            raise ValueError(f"two behaviours are called {name}")
        TABLE[name] = Behaviour(name, function, own_process, devices)
        return function

    return enter(function) if function else enter


@functools.cache
def load(suite: str) -> type[Subject]:
    """Fills the table with a suite's behaviours, and returns its subject's class."""
    folder = Path(__file__).parent / suite
    sys.path.insert(0, str(folder))
    module, name = SUITES[suite]
    for path in sorted(folder.glob("on_*.py")):
        importlib.import_module(path.stem)
    subject: type[Subject] = getattr(importlib.import_module(module), name)
    return subject
