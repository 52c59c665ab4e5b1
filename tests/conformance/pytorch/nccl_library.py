"""ctypes bindings of the NCCL library that PyTorch has loaded. Results are returned by name."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["FLOAT32", "NOT_GIVEN", "SUM", "Library", "UniqueId"]

SUM, FLOAT32 = 0, 7
#: The value of an output before a call.
NOT_GIVEN = -77
_RESULTS = (
    "success", "unhandled CUDA error", "system error", "internal error", "invalid argument", "invalid usage",
    "remote error", "in progress",
)  # fmt: skip


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Library:
    """Calls NCCL's functions, and creates and destroys communicators."""

    def __init__(self) -> None:
        torch.cuda.nccl.version()  # makes PyTorch load NCCL
        self._library = ctypes.CDLL("libnccl.so.2")
        self._made: list[ctypes.c_void_p] = []

    def call(self, name: str, *arguments: Any) -> str:
        """Calls a function; the name of its result."""
        result = getattr(self._library, name)(*arguments)
        return _RESULTS[result] if 0 <= result < len(_RESULTS) else f"result {result}"

    def text(self, name: str, *arguments: Any) -> str:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        return str(function(*arguments).decode())

    @contextlib.contextmanager
    def communicator(self) -> Iterator[ctypes.c_void_p]:
        """A communicator of one rank, on the current device.

        Raises:
            RuntimeError: NCCL cannot create it.
        """
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
        """The communicators of two ranks, on the first two devices.

        Raises:
            RuntimeError: NCCL cannot create them.
        """
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
