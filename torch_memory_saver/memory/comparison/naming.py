"""How call stacks and bytes are shown to a reader, in a terminal and on the page.

Owns which frames are the program's own: those outside of PyTorch, of this package and of Python's library.
"""

from __future__ import annotations

import os
import sysconfig

from ..model import CallStack, Frame, Origin

__all__ = ["file_name", "fold_native", "is_library", "mebibytes", "own_frames", "signed_mebibytes", "title"]

MIB = 1 << 20
_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARIES = ("torch/", "torch_memory_saver/")
#: Python's own modules, of this machine and of others.
_STANDARD = (sysconfig.get_paths()["stdlib"], "/lib/python3", "<frozen ")
#: Python before 3.12 runs a comprehension in a frame of its own, on the line of the function that has it.
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
#: C++ functions that every allocation passes through.
_ALLOCATOR = (
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda::(anonymous namespace)::gather",
    "c10::cuda::CUDACaching",
)
#: What a name of a C++ function is cut to: the arguments of templates are long.
_LONGEST_NATIVE = 90


def mebibytes(size: float) -> str:
    """A size in MiB, with as many digits as a small one needs."""
    number = size / MIB
    return f"{number:.1f}" if number == 0 or abs(number) >= 0.1 else f"{number:.4f}"


def signed_mebibytes(size: float) -> str:
    """A change in MiB, with its sign."""
    return ("+" if size > 0 else "") + mebibytes(size)


def file_name(frame: Frame) -> str:
    """The file of a frame; of an installed package, from the package on."""
    for folder in _INSTALLED:
        _, found, name = frame.filename.rpartition(folder)
        if found:
            return name
    return frame.filename


def is_library(frame: Frame) -> bool:
    """Whether the frame is of PyTorch, of this package or of Python itself."""
    name = file_name(frame)
    if name != frame.filename:
        return name.startswith(_LIBRARIES)
    return any(folder in name for folder in _STANDARD)


def own_frames(stack: CallStack) -> tuple[Frame, ...]:
    """The frames of the program, innermost first; all of them where it has none. A comprehension is its function's."""
    if stack.origin is Origin.NATIVE:
        return fold_native(stack)
    frames = tuple(frame for frame in stack.frames if not is_library(frame)) or stack.frames
    return tuple(frame for frame in frames if frame.name not in _COMPREHENSIONS) or frames


def fold_native(stack: CallStack) -> tuple[Frame, ...]:
    """The C++ frames outside of the allocator, their names cut."""
    told = [frame for frame in stack.frames if not frame.name.startswith(_ALLOCATOR)] or stack.frames
    return tuple(frame._replace(name=_cut(frame.name)) for frame in told)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NATIVE else name[: _LONGEST_NATIVE - 3] + "..."


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
