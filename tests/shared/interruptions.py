"""A stand-in for a signal whose handler raises: an exception between two bytecodes of this package, at any possible place.

Python runs signal handlers between bytecodes. A trace function is called there as well, and its exceptions arise there.
It is also called at the end of a with statement, where Python since 3.11 runs no handler, and an exception would leave a
lock held. So the code under test must use no with statement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch_memory_saver

_PACKAGE = str(Path(torch_memory_saver.__file__).parent)
#: The simulated GPU's operators, which are C++ code on a real GPU.
_SIMULATED = str(Path(_PACKAGE) / "_simulate")


class Interruption(BaseException):
    """The exception of the handler."""


def _interrupt() -> None:
    raise Interruption


class _Handler:
    """Calls a function at the place with the given number, if it is 0 or more. It raises by default."""

    def __init__(self, at: int, act: Callable[[], object] = _interrupt) -> None:
        self._at = at
        self._act = act
        self.places = 0

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or name.startswith(_SIMULATED) or frame.f_code.co_name == "__del__":
            return None  # Python drops exceptions of a finaliser
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._place()
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._place()
        return self._inside

    def _place(self) -> None:
        self.places += 1
        if self.places - 1 == self._at:
            self._act()


def places_of(work: Callable[[], object]) -> int:
    """Call `work` without an interruption. Returns the number of places at which there could be one."""
    handler = _Handler(-1)
    _trace(work, handler)
    return handler.places


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Call `work` with an exception at the place with the number `at`. Returns whether it came to that."""
    try:
        _trace(work, _Handler(at))
    except Interruption:
        return True
    return False


def _trace(work: Callable[[], object], handler: _Handler) -> None:
    before = sys.gettrace()
    sys.settrace(handler.call)
    try:
        work()
    finally:
        sys.settrace(before)


def every_interruption(work: Callable[[], object], step: int = 1) -> Iterator[int]:
    """Call `work` again and again, interrupted at the first place, the second, and so on (or each `step`-th), until it ends
    without an interruption. Yields the number of each place after the call."""
    at = 0
    while interrupted(work, at):
        yield at
        at += step


def finalize_at_every_place(work: Callable[[], object], finalizer: Callable[[], object]) -> None:
    """Call `work` once for each place, and `finalizer` at that place, as the garbage collector may call one anywhere."""
    for at in range(places_of(work)):
        _trace(work, _Handler(at, finalizer))
