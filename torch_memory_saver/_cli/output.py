"""The output of commands on the terminal: lines and paths, a bar chart of memory, and the progress of a pause or resume.

Lines may have paths and names that the encoding of the terminal lacks. The progress goes to stderr, because stdout is for
results: a bar of tqdm if that is installed, otherwise a line after each tenth. It is not shown if stderr is not a terminal.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from torch_memory_saver._text import binary_size
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["can_draw_blocks", "draw", "progress_bar", "width", "write_line", "write_path", "writing"]

#: The width of a table that goes to a file or a pipe.
_WIDTH_WITHOUT_TERMINAL = 100
_BLOCKS = "█▓▒·"
_ASCII = "#=+."
_LARGEST_WIDTH = 100
_SMALLEST_BAR = 10
#: The number of parts into which an operation is divided. Without tqdm, a line is written after each part.
_LINES = 10


def width() -> int:
    """Return the columns of the terminal, or of a table that goes elsewhere."""
    return shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line, or several, for people. Characters that the encoding of the stream (default: stdout) lacks are shown by
    their numbers."""
    target = sys.stdout if stream is None else stream
    encoding = target.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)


def write_path(path: str | os.PathLike[str]) -> None:
    """Write a line that is a path, for programs: byte by byte as it is in the file system."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def writing(command: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what keeps a file from being written as a wrong use of the command. ``_files.py`` has raised it.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = str(error.strerror).partition(": ")[2]  # without the name of the function
        raise InvalidArgumentError(f"{os.fspath(path)}: {reason}", operation=command) from error


def can_draw_blocks(stream: TextIO) -> bool:
    """Return whether the stream's encoding has the block characters."""
    try:
        _BLOCKS.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def draw(
    stages: Sequence[tuple[str, Mapping[str, int]]], capacity: int, ascii_only: bool, width: int | None = None
) -> list[str]:
    """Return a line for each stage, with a bar as long as the memory in use, and a legend.

    Args:
        stages: The name of each stage, and its bytes by category. There may be at most four categories in all.
        capacity: Bytes that a full bar stands for.
        width: Characters in a line (default: as the terminal has).
    """
    glyphs = _ASCII if ascii_only else _BLOCKS
    categories = list(dict.fromkeys(name for _, parts in stages for name in parts))
    width = min(width or shutil.get_terminal_size().columns, _LARGEST_WIDTH)
    label = max(len(name) for name, _ in stages)
    amount = max(len(binary_size(sum(parts.values()))) for _, parts in stages)
    cells = max(width - label - amount - 6, _SMALLEST_BAR)
    edge = "|" if ascii_only else "│"
    lines = []
    for name, parts in stages:
        bar, drawn, total = "", 0, 0
        for category, glyph in zip(categories, glyphs, strict=False):
            # Each part ends at the rounded sum so far, so that rounding errors do not add up.
            total += parts.get(category, 0)
            end = min(round(cells * total / capacity), cells)
            bar += glyph * (end - drawn)
            drawn = max(drawn, end)
        lines.append(f"{name:<{label}} {edge}{bar:<{cells}}{edge} {binary_size(sum(parts.values())):>{amount}}")
    legend = "   ".join(f"{glyph} {category}" for category, glyph in zip(categories, glyphs, strict=False))
    return [*lines, f"{'':<{label}}  {legend}"]


@contextlib.contextmanager
def progress_bar(title: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Give the argument ``progress`` for pause or resume, valid as long as the context lasts; None if nothing is shown.

    Args:
        title: The name of the operation, which is shown.
        stream: Where the bar is written, if it is a terminal (default: stderr).
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield _Lines(title, stream)
        return
    with tqdm(desc=title, file=stream, unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:
        yield _Bar(bar)


class _Bar:
    """A progress display that updates a bar of tqdm."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, done: int, total: int) -> None:
        if self._bar.total != total:
            self._bar.reset(total)
        self._bar.update(done - self._bar.n)


class _Lines:
    """A progress display that writes a line after each tenth."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        part = done * _LINES // total if total else _LINES
        if part > self._shown:
            self._shown = part
            print(f"{self._title}: {binary_size(done)} of {binary_size(total)}", file=self._stream, flush=True)
