"""The writer of matplotlib's pictures. It does not use pyplot, so the program's backend stays as it is.

With one release of matplotlib, equal pictures give SVG files with equal bytes.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_memory_saver._files import write_bytes_file
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["write_picture"]

_DPI = 120


def write_picture(
    path: str | os.PathLike[str], operation: str, inches: tuple[float, float], draw: Callable[[Any], object]
) -> None:
    """Call `draw` with a figure of a width and a height, and write it. The suffix of the path says the format.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the format. `operation` is for the message.
        OSError: The file cannot be written.
    """
    try:
        figure_of = importlib.import_module("matplotlib.figure").Figure
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise InvalidArgumentError(f"{operation} needs matplotlib: pip install matplotlib ({error})") from error
    suffix = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    # The salt makes the ids of an SVG file the same every time. Text that stays text keeps the file small.
    with matplotlib.rc_context({"svg.hashsalt": operation, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = figure_of(figsize=inches, layout="constrained")
        if suffix not in figure.canvas.get_supported_filetypes():
            raise InvalidArgumentError(f"matplotlib writes no file that ends in {suffix!r}: {os.fspath(path)}")
        draw(figure)
        picture = io.BytesIO()
        figure.savefig(picture, format=suffix, dpi=_DPI, metadata={"Date": None} if suffix == "svg" else None)
    write_bytes_file(picture.getvalue(), Path(path), operation, "the picture was")
