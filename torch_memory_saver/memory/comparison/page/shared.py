"""The call stacks of a page: each has a number, and small ones share the number of "other call stacks".

Owns the numbers. Frames are texts of a common list, because stacks share most of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_memory_saver._stacks import CallStack, Frame, Origin, file_name, fold_native, is_library, title

__all__ = ["OTHER", "StackNumbers"]

#: The number of all call stacks that have none of their own.
OTHER = 0


class StackNumbers:
    """Numbers for call stacks.

    Args:
        leaking: The stacks that are drawn in the colours of leaks.
        told: The stacks that get a number, the most important first.
    """

    def __init__(self, leaking: Iterable[CallStack], told: Iterable[CallStack]) -> None:
        self._leaking = set(leaking)
        self._numbers = {stack: number for number, stack in enumerate(dict.fromkeys(told), OTHER + 1)}
        self._frames: dict[str, int] = {}

    def __getitem__(self, stack: CallStack) -> int:
        return self._numbers.get(stack, OTHER)

    def data(self) -> dict[str, Any]:
        """The stacks by number, and the texts of their frames."""
        rows: list[dict[str, Any]] = [
            {"title": "other call stacks", "frames": [], "leak": False, "native": 0, "known": False}
        ]
        rows += [self._row(stack) for stack in self._numbers]
        return {"stacks": rows, "frames": list(self._frames)}

    def _row(self, stack: CallStack) -> dict[str, Any]:
        native = stack.origin is Origin.NATIVE
        frames = fold_native(stack) if native else stack.frames
        return {
            "title": title(stack),
            "frames": [self._frame(frame, native) for frame in frames],
            "leak": stack in self._leaking,
            "native": stack.native_frames,
            "known": bool(stack.frames),
        }

    def _frame(self, frame: Frame, native: bool) -> int:
        text = f"C++ {frame.name}" if native else f"{file_name(frame)}:{frame.line} {frame.name}"
        mark = " " if is_library(frame) or native else "*"
        return self._frames.setdefault(mark + text, len(self._frames))
