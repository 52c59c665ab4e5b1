"""Who explains an out-of-memory error before it reaches the program.

The engine knows no reports. The layer that makes them registers a function, when the package is imported. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_memory_saver.errors import OutOfMemoryError

__all__ = ["explain", "register"]

_Explain = Callable[[OutOfMemoryError, tuple[str, ...] | None], str]

_explanations: list[_Explain] = []


def register(explanation: _Explain) -> None:
    """Have a function called with each error of a resume, after its last attempt, and with the tags that the resume selects.
    It may add to the message, and returns what it added. It must not raise."""
    _explanations.append(explanation)


def explain(error: OutOfMemoryError, tags: tuple[str, ...] | None) -> str:
    """Return what was added to the message; "" if nobody explains it."""
    return "".join([explanation(error, tags) for explanation in _explanations])
