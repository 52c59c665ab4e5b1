"""Call stacks of allocations: made from PyTorch's rows of frames, and shortened for readers.

This module decides which frames are C++ frames, and which are the program's own: those outside of PyTorch, of this package
and of Python's library. It needs no PyTorch.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "CallStack",
    "CallStacks",
    "Frame",
    "Origin",
    "file_name",
    "fold_native",
    "is_library",
    "own_frames",
    "title",
    "whole_number",
]

_NATIVE_SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".inl", ".S", ".so")

_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARIES = ("torch/", "torch_memory_saver/")
#: The simulated GPU's operators, which no call stack contains on a GPU.
_SIMULATED = "torch_memory_saver/_simulate/"
#: Python's own modules, of this machine and of others.
_STANDARD = (os.path.dirname(os.__file__), "/lib/python3", "<frozen ")
#: Python before 3.12 runs a comprehension in a frame of its own, on the line of the function that has it.
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
#: C++ functions that every allocation passes through.
_ALLOCATOR = (
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda::(anonymous namespace)::gather",
    "c10::cuda::CUDACaching",
)
#: The length to which names of C++ functions are cut, because the arguments of templates are long.
_MAX_NATIVE = 90
#: Numbers in files have 64 bits, with or without a sign.
_MIN, _MAX = -(1 << 63), 1 << 64


class Frame(NamedTuple):
    """One call of a stack."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} {self.name}"


class Origin(enum.Enum):
    """The kind of information that is known about the origin of an allocation."""

    PYTHON = "Python frames"
    NATIVE = "C++ frames only"
    NO_FRAMES = "no Python frames (a thread of C++, such as a backward pass)"
    UNRECORDED = "allocated before recording"


@dataclass(frozen=True)
class CallStack:
    """The call stack of an allocation. Equal stacks have equal `frames` and `origin`.

    Attributes:
        frames: Python frames, innermost first, or the C++ frames if there is no Python frame; () if nothing is known.
        origin: Kind of information in `frames`.
        native_frames: Number of C++ frames that were recorded with the stack.
    """

    frames: tuple[Frame, ...]
    origin: Origin
    native_frames: int = field(default=0, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Stacks are keys of every table of a comparison: their frames are hashed once.
        object.__setattr__(self, "_hash", hash((self.frames, self.origin)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return " < ".join(map(str, self.frames)) or self.origin.value

    def as_dict(self) -> dict[str, Any]:
        """Return the frames, innermost first, the number of C++ frames, and what is known of the origin, for JSON."""
        return {
            "frames": [frame._asdict() for frame in self.frames],
            "native_frames": self.native_frames,
            "origin": self.origin.name.lower(),
        }


class CallStacks:
    """The call stacks of a snapshot. Equal stacks are one object, and so is each list of frames that the snapshot shares."""

    def __init__(self) -> None:
        self._by_list: dict[int, CallStack] = {}
        self._by_value: dict[CallStack, CallStack] = {}
        self._kept: list[object] = []

    def get(self, frames: list[Mapping[str, Any]] | None, recorded: bool) -> CallStack:
        """Return the stack of these frames. `recorded`: whether the allocation itself was seen, also without frames."""
        if not frames:
            return self._shared(CallStack((), Origin.NO_FRAMES if recorded else Origin.UNRECORDED))
        found = self._by_list.get(id(frames))
        if found is None:
            found = self._by_list[id(frames)] = self._shared(_stack(frames))
            self._kept.append(frames)  # so that no other list gets its id
        return found

    def _shared(self, stack: CallStack) -> CallStack:
        return self._by_value.setdefault(stack, stack)


def _stack(rows: Iterable[Mapping[str, Any]]) -> CallStack:
    frames = [Frame(_text_of(row["filename"]), whole_number(row["line"]), _text_of(row["name"])) for row in rows]
    frames = [frame for frame in frames if _SIMULATED not in frame.filename]
    if not frames:
        return CallStack((), Origin.NO_FRAMES)
    python = tuple(frame for frame in frames if not _is_native(frame))
    if python:
        return CallStack(python, Origin.PYTHON, len(frames) - len(python))
    return CallStack(tuple(frames), Origin.NATIVE, len(frames))


def _is_native(frame: Frame) -> bool:
    """Return whether it is C or C++: PyTorch mixes them with Python frames if it records stacks "all"."""
    return (
        (frame.line == 0 and not frame.filename.endswith(".py"))
        or frame.filename in ("", "??")
        or frame.filename.endswith(_NATIVE_SUFFIXES)
        or ".so." in frame.filename
        or "::" in frame.name
    )


def whole_number(value: object) -> int:
    """Return a number of a file.

    Raises:
        TypeError: It is no whole number.
        ValueError: It has more than 64 bits.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number that is whole")
    if not _MIN <= value < _MAX:
        raise ValueError("a number has more than 64 bits")
    return value


def _text_of(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value or ""


def file_name(frame: Frame) -> str:
    """Return the file of a frame; of an installed package, from the package on."""
    for folder in _INSTALLED:
        _, found, name = frame.filename.rpartition(folder)
        if found:
            return name
    return frame.filename


def is_library(frame: Frame) -> bool:
    """Return whether the frame is of PyTorch, of this package or of Python itself."""
    name = file_name(frame)
    if name != frame.filename:
        return name.startswith(_LIBRARIES)
    return any(folder in name for folder in _STANDARD)


def own_frames(stack: CallStack) -> tuple[Frame, ...]:
    """Return the frames of the program, innermost first; all of them where it has none. A comprehension is its
    function's."""
    if stack.origin is Origin.NATIVE:
        return fold_native(stack)
    frames = tuple(frame for frame in stack.frames if not is_library(frame)) or stack.frames
    return tuple(frame for frame in frames if frame.name not in _COMPREHENSIONS) or frames


def fold_native(stack: CallStack) -> tuple[Frame, ...]:
    """Return the C++ frames outside of the allocator, their names cut."""
    shown = [frame for frame in stack.frames if not frame.name.startswith(_ALLOCATOR)] or stack.frames
    return tuple(frame._replace(name=_cut(frame.name)) for frame in shown)


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NATIVE else name[: _MAX_NATIVE - 3] + "..."


def title(stack: CallStack) -> str:
    """One line: the innermost frame of the program and its caller, such as "images.py:88 to_gpu < server.py:10 main"."""
    frames = own_frames(stack)
    if not frames:
        return stack.origin.value
    if stack.origin is Origin.NATIVE:
        return f"C++: {frames[0].name}"
    inner, *callers = frames
    text = f"{os.path.basename(inner.filename)}:{inner.line} {inner.name}"
    if callers:
        file = "" if callers[0].filename == inner.filename else os.path.basename(callers[0].filename)
        text += f" < {file}:{callers[0].line} {callers[0].name}"
    return text
