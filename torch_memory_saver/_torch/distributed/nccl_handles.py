"""NCCL communicators that a program holds as a handle, and the library that made each of them.

PyNccl of vLLM and SGLang makes such communicators. A process may load several NCCL libraries, so a version belongs to a
library. A handle is only valid for the library that made it.

NCCL is called through ctypes, which releases the GIL. Nothing is locked, and no library is loaded. After the construction
only `statistics`, `suspend` and `resume` call NCCL. The ledger calls none of them, because a handle may be that of a
destroyed communicator.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from typing import NamedTuple

from torch_memory_saver.errors import InvalidArgumentError, TorchMemorySaverError

__all__ = ["HandleCommunicator", "Statistics", "why_too_old"]

logger = logging.getLogger("torch_memory_saver")

#: The first NCCL with ncclCommSuspend.
_FIRST_NCCL = (2, 29, 7)
_SUSPENSION_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")

_INT = ctypes.POINTER(ctypes.c_int)
#: The parameters of each function after the communicator.
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "ncclCommCount": (_INT,),
    "ncclCommGetAsyncError": (_INT,),
    "ncclCommMemStats": (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)),
    "ncclCommSuspend": (ctypes.c_int,),
    "ncclCommResume": (),
}
#: Values of ncclResult_t.
_SUCCESS, _INVALID_ARGUMENT, _IN_PROGRESS = 0, 4, 7
#: Values of ncclCommMemStat_t.
_IS_SUSPENDED, _PERSISTENT_BYTES = 1, 2
#: The flag NCCL_SUSPEND_MEM.
_SUSPEND_MEMORY = 1
#: Seconds between two calls of ncclCommGetAsyncError.
_POLL_S = 0.001


class Statistics(NamedTuple):
    """State and memory of a communicator, by ncclCommMemStats. NCCL does not release `kept_bytes` of device memory."""

    suspended: bool
    kept_bytes: int


def why_too_old(version: tuple[int, ...], library: str = "") -> str | None:
    """Return why an NCCL of this version cannot suspend, or None if it can."""
    if version >= _FIRST_NCCL:
        return None
    return f"NCCL {_dotted(version)}{library} has no ncclCommSuspend, which NCCL {_dotted(_FIRST_NCCL)} has"


class HandleCommunicator:
    """A communicator by its handle.

    A `ctypes.c_void_p` is read at each call. Without a value there is no communicator any more.

    Raises:
        InvalidArgumentError: The arguments have other types, the library is no NCCL, or it refuses the handle.
    """

    def __init__(self, handle: int | ctypes.c_void_p, library: ctypes.CDLL) -> None:
        if not isinstance(library, ctypes.CDLL) or not isinstance(handle, (int, ctypes.c_void_p)):
            raise InvalidArgumentError(
                "a pair in groups must be a handle (int or ctypes.c_void_p) and its library (ctypes.CDLL), not "
                f"{type(handle).__name__} and {type(library).__name__}: for PyNccl (pynccl.comm, pynccl.nccl.lib)"
            )
        self._handle, self._library = handle, library
        self._file = os.path.basename(library._name or "the program")
        self._has_warned = False
        self.name = f"{_value(handle) or 0:#x}"
        version = self._version()
        self._reason = why_too_old(version, f" ({self._file})") or self._what_is_missing(version)
        self._check()

    def exists(self) -> bool:
        """Return whether the handle has a value. NCCL is not called."""
        return bool(_value(self._handle))

    def why_not(self) -> str | None:
        """Return why the communicator cannot be suspended, or None if it can."""
        return self._reason

    def statistics(self) -> Statistics | None:
        """Return the state of the communicator, or None if it was destroyed. The first refusal by NCCL is logged.

        Raises:
            TorchMemorySaverError: NCCL fails.
        """
        if not self.exists():
            return None
        suspended = self._statistic(_IS_SUSPENDED)
        kept_bytes = self._statistic(_PERSISTENT_BYTES)
        if suspended is None or kept_bytes is None:
            self._warn_of_destroyed()
            return None
        return Statistics(suspended != 0, kept_bytes)

    def suspend(self) -> None:
        """Suspend the communicator, with the other ranks.

        Raises:
            TorchMemorySaverError: NCCL fails.
        """
        self._finish("ncclCommSuspend", self._call("ncclCommSuspend", _SUSPEND_MEMORY))

    def resume(self) -> None:
        """Resume the communicator, with the other ranks.

        Raises:
            TorchMemorySaverError: NCCL fails.
        """
        self._finish("ncclCommResume", self._call("ncclCommResume"))

    def _version(self) -> tuple[int, ...]:
        code = ctypes.c_int()
        try:
            get_version = self._library["ncclGetVersion"]
        except AttributeError:
            raise InvalidArgumentError(
                f"{self._file} has no ncclGetVersion, so it is not an NCCL library: pass the library that made the handle"
            ) from None
        get_version.argtypes = (_INT,)
        get_version(ctypes.byref(code))
        unit = 10_000 if code.value >= 10_000 else 1_000  # the second until NCCL 2.8
        return code.value // unit, code.value % unit // 100, code.value % 100

    def _what_is_missing(self, version: tuple[int, ...]) -> str | None:
        missing = [name for name in _SUSPENSION_FUNCTIONS if not hasattr(self._library, name)]
        return f"NCCL {_dotted(version)} ({self._file}) has no {missing[0]}" if missing else None

    def _check(self) -> None:
        """Check that the library accepts the handle, by a function that every version has."""
        count = ctypes.c_int()
        result = self._call("ncclCommCount", ctypes.byref(count)) if self.exists() else _INVALID_ARGUMENT
        if result != _SUCCESS:
            raise InvalidArgumentError(
                f"{self.name} is not a communicator of {self._file}, or is not ready: ncclCommCount returned {result}; pass "
                "the handle of a communicator that exists, and the library that made it"
            )

    def _statistic(self, which: int) -> int | None:
        value = ctypes.c_uint64()
        result = self._call("ncclCommMemStats", which, ctypes.byref(value))
        if result == _INVALID_ARGUMENT:
            return None
        self._finish("ncclCommMemStats", result)
        return value.value

    def _warn_of_destroyed(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NCCL communicator %s of %s was destroyed, so it is neither suspended nor resumed. Before you destroy a "
                "communicator, remove its hook or set the value of its c_void_p to None.",
                self.name,
                self._file,
            )

    def _call(self, function: str, *arguments: object) -> int:
        # The subscript makes a new function object. The attribute is shared with the program, which sets its own types.
        call = self._library[function]
        call.argtypes = (ctypes.c_void_p, *_PARAMETERS[function])
        return int(call(_value(self._handle), *arguments))

    def _finish(self, function: str, result: int) -> None:
        """Wait until a communicator that does not block has finished.

        Raises:
            TorchMemorySaverError: NCCL has failed.
        """
        state = ctypes.c_int(result)
        while state.value == _IN_PROGRESS:
            time.sleep(_POLL_S)
            returned = self._call("ncclCommGetAsyncError", ctypes.byref(state))
            state.value = state.value if returned == _SUCCESS else returned
        if state.value != _SUCCESS:
            text = self._text("ncclGetErrorString", state)
            last = self._text("ncclGetLastError", ctypes.c_void_p(_value(self._handle)))
            raise TorchMemorySaverError(
                f"{function} of NCCL communicator {self.name} ({self._file}) returned {state.value} ({text}). NCCL's last "
                f"error: {last or 'none'}. NCCL_DEBUG=WARN shows more.",
                driver_call=function,
            )

    def _text(self, function: str, argument: object) -> str:
        call = self._library[function]
        call.restype = ctypes.c_char_p
        return (call(argument) or b"").decode(errors="replace").strip()


def _value(handle: int | ctypes.c_void_p) -> int | None:
    return handle.value if isinstance(handle, ctypes.c_void_p) else handle


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
