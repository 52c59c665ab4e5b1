"""NCCL through ctypes: the library that PyTorch has loaded, with every result as a name."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["FLOAT32", "NOT_GIVEN", "SUM", "Library", "UniqueId"]

SUM, FLOAT32 = 0, 7
#: What an output holds before a call.
NOT_GIVEN = -77
_RESULTS = (
    "success", "unhandled CUDA error", "system error", "internal error", "invalid argument", "invalid usage",
    "remote error", "in progress",
)  # fmt: skip


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Library:
    """Calls functions, and destroys the communicators that it made."""

    def __init__(self) -> None:
        torch.cuda.nccl.version()  # PyTorch loads it
        self._library = ctypes.CDLL("libnccl.so.2")
        self._made: list[ctypes.c_void_p] = []

    def call(self, name: str, *arguments: Any) -> str:
        """The name of the result."""
        result = getattr(self._library, name)(*arguments)
        return _RESULTS[result] if 0 <= result < len(_RESULTS) else f"result {result}"

    def text(self, name: str, *arguments: Any) -> str:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        return str(function(*arguments).decode())

    @contextlib.contextmanager
    def communicator(self) -> Iterator[ctypes.c_void_p]:
        """Of one rank, on the current device."""
        made, identity = ctypes.c_void_p(), UniqueId()
        results = [self.call("ncclGetUniqueId", ctypes.byref(identity))]
        results.append(self.call("ncclCommInitRank", ctypes.byref(made), 1, identity, 0))
        if results != ["success"] * 2:
            raise RuntimeError(f"making a communicator: {results}")
        yield made
        torch.cuda.synchronize()
        self.call("ncclCommDestroy", made)

    @contextlib.contextmanager
    def pair(self) -> Iterator[Any]:
        """Of two ranks, on the first two devices."""
        made = (ctypes.c_void_p * 2)()
        result = self.call("ncclCommInitAll", made, 2, (ctypes.c_int * 2)(0, 1))
        if result != "success":
            raise RuntimeError(f"making two communicators: {result}")
        communicators = [ctypes.c_void_p(each) for each in made]
        yield communicators
        for device in range(2):
            torch.cuda.synchronize(device)
        for each in communicators:
            self.call("ncclCommDestroy", each)
