"""Programs of this package that run in another Python process.

``python -c`` and ``python -m`` import from the working directory first, where another user may have put modules of any name.
These programs import from there only if PYTHONPATH names the directory.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["command_options", "program_options"]

#: The folder of the package, which comes in place of the working directory.
_ROOT = str(Path(os.path.abspath(__file__)).parents[2])
_FIRST = f"import sys; sys.path[:] = [{_ROOT!r}, *filter(None, sys.path)]\n"
_MAIN = "import runpy; runpy.run_module('torch_memory_saver', run_name='__main__', alter_sys=True)"


def program_options(text: str) -> list[str]:
    """Return the options with which a Python runs the program `text`, which may import this package."""
    return ["-c", _FIRST + text]


def command_options(*arguments: str) -> list[str]:
    """Return the options with which a Python runs a command of this package."""
    return [*program_options(_MAIN), *arguments]
