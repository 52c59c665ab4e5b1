"""Reading a snapshot file without running anything of it: the pickle may hold plain values only.

Owns the file and its errors. parsing.py knows what is in it.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, BinaryIO

from torch_memory_saver.errors import InvalidArgumentError

from .model import Snapshot
from .parsing import parse

__all__ = ["load_snapshot"]

#: What `pickle` raises for a file that is no pickle, or ends early.
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)
#: What parsing.py raises for values that are no snapshot.
_UNKNOWN_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class _RefusedGlobal(Exception):
    """The pickle names a class or a function."""


class _PlainUnpickler(pickle.Unpickler):
    """Makes dicts, lists, tuples, texts and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise _RefusedGlobal(f"{module}.{name}")


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot of this package, or one that PyTorch wrote (torch.cuda.memory._dump_snapshot()).

    Nothing in the file is run: a pickle that names any class or function is refused. PyTorch is not needed.

    Args:
        path: The file.

    Raises:
        InvalidArgumentError: The file cannot be read, is cut off, holds more than plain values, or is no snapshot. The
            message names the file and says what to do.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = _unpickle(file)
    except OSError as error:
        raise _error(name, f"cannot be read: {error.strerror}: check the path") from error
    except _RefusedGlobal as error:
        advice = "a snapshot needs none, so the file is not loaded: do not use a file from a source that you do not trust"
        raise _error(name, f"names {error}, a class or a function: {advice}") from error
    except EOFError as error:
        raise _error(
            name, "is empty or cut off: its process may have ended while writing; take the snapshot again"
        ) from error
    except _UNREADABLE as error:
        # The C unpickler calls a cut in the middle of a value "truncated".
        if "truncated" in str(error):
            raise _error(name, "is cut off: its process may have ended while writing; take the snapshot again") from error
        raise _error(name, f"is no pickle ({error}): {_WANTED}") from error
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise _error(name, f'is a pickle, but no snapshot (it has no list "segments"): {_WANTED}')
    try:
        return parse(content, name)
    except _UNKNOWN_SHAPE as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise _error(name, f"is not a snapshot that this release can read ({what}): {_WANTED}") from error


#: The advice for a file of something else.
_WANTED = "give files that torch_memory_saver.memory or torch.cuda.memory._dump_snapshot() has written"


def _unpickle(file: BinaryIO) -> Any:
    return _PlainUnpickler(file).load()


def _error(name: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"load_snapshot: {name} {what}.", operation="load_snapshot")
