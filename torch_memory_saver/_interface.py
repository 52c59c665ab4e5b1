"""The version of the package. Importing this module fails if the native library beside these files is missing or does not
match them.

The library's ``INTERFACE`` is the CRC-32 of the ``_core.pyi`` that it was built with (setup.py). That file declares
everything that the Python files use of the library, and has a checksum of the headers of the function table. So an editable
install survives every edit of a Python file, and a library built from other sources is never called.
"""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path

__all__ = ["__version__"]

__version__ = "1.0.0a1"

_FOLDER = Path(__file__).parent


def _what_to_do() -> str:
    root = _FOLDER.parent
    if (root / "setup.py").is_file():
        return f"build it with 'pip install .' in {root}"
    return (
        "install the package again from where it came, such as with 'pip install --force-reinstall .' in a clone "
        "of this project (the package of this name on PyPI is another one)"
    )


def _check() -> None:
    """Check that the library and this package belong together.

    Raises:
        ImportError: The library is missing or has another interface. The message says in one sentence what to do.
    """
    try:
        core = importlib.import_module("torch_memory_saver._core")
    except ModuleNotFoundError as error:
        if error.name != "torch_memory_saver._core":
            raise
        text = f"torch_memory_saver has no native library in {_FOLDER}: {_what_to_do()}"
        raise ImportError(text, name=error.name, path=str(_FOLDER)) from None
    try:
        declared = zlib.crc32((_FOLDER / "_core.pyi").read_bytes())
    except OSError:
        return  # a packager removed the declarations, so there is nothing to compare
    if getattr(core, "INTERFACE", None) != declared:
        text = (
            f"the native library {core.__file__} was not built for the Python files of torch_memory_saver in {_FOLDER}: "
            f"{_what_to_do()}"
        )
        raise ImportError(text, name=core.__name__, path=core.__file__)


_check()
