"""A progress bar on the terminal: tqdm's if it is installed, otherwise a line after each tenth.

Nothing is shown if stderr is not a terminal. Nothing is written to stdout, which is for results.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from torch_memory_saver._text import binary_size

__all__ = ["progress_bar"]

#: Into how many parts an operation is divided. Without tqdm, a line is written after each part.
_LINES = 10


@contextlib.contextmanager
def progress_bar(title: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """The argument ``progress`` for pause or resume, valid as long as the context lasts; None if nothing is shown.

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
    """Updates a bar of tqdm."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, done: int, total: int) -> None:
        if self._bar.total != total:
            self._bar.reset(total)
        self._bar.update(done - self._bar.n)


class _Lines:
    """Writes a line with the progress after each tenth."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        part = done * _LINES // total if total else _LINES
        if part > self._shown:
            self._shown = part
            print(f"{self._title}: {binary_size(done)} of {binary_size(total)}", file=self._stream, flush=True)
