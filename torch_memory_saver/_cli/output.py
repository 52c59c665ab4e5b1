"""What commands write on stdout, with paths and names that the encoding of the terminal may lack."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

__all__ = ["width", "write_line", "write_path"]

#: The width of a table that goes to a file or a pipe.
_WIDTH_WITHOUT_TERMINAL = 100


def width() -> int:
    """Return the columns of the terminal, or of a table that goes elsewhere."""
    return shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Writes a line, or several, for people. What the encoding of the stream (default: stdout) lacks is shown by its
    number."""
    target = sys.stdout if stream is None else stream
    encoding = target.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)


def write_path(path: str | os.PathLike[str]) -> None:
    """Writes a line that is a path, for programs: byte by byte as it is in the file system."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.buffer.flush()
