"""ctypes bindings of the operator functions of the preloaded simulated GPU (csrc/simulator/simulator.h)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

__all__ = ["CUresult", "Operand", "ask", "attach", "run"]

CUresult = int
#: Address, size in bytes, and 1 if the operator may write to it, else 0.
Operand = tuple[int, int, int]

#: tms_sim_operand_t: its last member is an int followed by padding.
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


# ctypes releases Python's interpreter lock during these calls, some of which wait.
_library = ctypes.CDLL(None)
_library.tms_sim_attach_device_process.argtypes = (ctypes.c_int,)
_library.tms_sim_attach_device_process.restype = None
_library.tms_sim_run_operator.argtypes = (ctypes.POINTER(_Operator),)
_library.tms_sim_ask_operator.argtypes = (ctypes.POINTER(_Operator), ctypes.POINTER(_Answer))
_library.tms_sim_free_answer.argtypes = (ctypes.POINTER(_Answer),)
_library.tms_sim_free_answer.restype = None


def attach(socket: int) -> None:
    """Passes the socket of the device process to the simulated GPU, which takes ownership."""
    _library.tms_sim_attach_device_process(socket)


def _operator(stream: int, request: bytes, operands: Sequence[Operand]) -> _Operator:
    packed = b"".join([_OPERAND.pack(*operand) for operand in operands])
    return _Operator(stream, 0, packed, len(operands), request, len(request))


def run(stream: int, request: bytes, operands: Sequence[Operand]) -> CUresult:
    """Enqueues a request on a stream of the current device, or captures it. Returns the CUresult."""
    return int(_library.tms_sim_run_operator(ctypes.byref(_operator(stream, request, operands))))


def ask(stream: int, request: bytes, operands: Sequence[Operand]) -> tuple[CUresult, bytes]:
    """Enqueues a request and waits for it. Returns the CUresult and the answer, which is empty after an error."""
    answer = _Answer()
    result = int(_library.tms_sim_ask_operator(ctypes.byref(_operator(stream, request, operands)), ctypes.byref(answer)))
    if result != _SUCCESS:
        return result, b""
    try:
        return result, ctypes.string_at(answer.text, answer.bytes)
    finally:
        _library.tms_sim_free_answer(ctypes.byref(answer))
