"""The operator functions of the simulated GPU (csrc/simulator/simulator.h), which is preloaded."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

__all__ = ["CUresult", "Operand", "ask", "attach", "run"]

CUresult = int
#: Address, bytes, and 1 if it may be written to.
Operand = tuple[int, int, int]

#: tms_sim_operand_t: its last member is an int, with padding behind it.
_OPERAND = struct.Struct("=QQQ")
_SUCCESS = 0


class _Operator(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("gate", ctypes.c_int),
        ("operands", ctypes.c_char_p),
        ("operand_count", ctypes.c_size_t),
        ("request", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
    )


class _Answer(ctypes.Structure):
    _fields_ = (("text", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


# Its functions wait without Python's interpreter lock.
_library = ctypes.CDLL(None)
_library.tms_sim_attach_device_process.argtypes = (ctypes.c_int,)
_library.tms_sim_attach_device_process.restype = None
_library.tms_sim_run_operator.argtypes = (ctypes.POINTER(_Operator),)
_library.tms_sim_ask_operator.argtypes = (ctypes.POINTER(_Operator), ctypes.POINTER(_Answer))
_library.tms_sim_free_answer.argtypes = (ctypes.POINTER(_Answer),)
_library.tms_sim_free_answer.restype = None


def attach(socket: int) -> None:
    """Gives the simulated GPU the socket to the device process; it closes it."""
    _library.tms_sim_attach_device_process(socket)


def _operator(stream: int, request: bytes, operands: Sequence[Operand]) -> _Operator:
    packed = b"".join([_OPERAND.pack(*operand) for operand in operands])
    return _Operator(stream, 0, packed, len(operands), request, len(request))


def run(stream: int, request: bytes, operands: Sequence[Operand]) -> CUresult:
    """Enqueues a request on a stream of the current device, or captures it."""
    return int(_library.tms_sim_run_operator(ctypes.byref(_operator(stream, request, operands))))


def ask(stream: int, request: bytes, operands: Sequence[Operand]) -> tuple[CUresult, bytes]:
    """Enqueues a request, waits for it, and returns the answer."""
    answer = _Answer()
    result = int(_library.tms_sim_ask_operator(ctypes.byref(_operator(stream, request, operands)), ctypes.byref(answer)))
    if result != _SUCCESS:
        return result, b""
    try:
        return result, ctypes.string_at(answer.text, answer.bytes)
    finally:
        _library.tms_sim_free_answer(ctypes.byref(answer))
