"""ctypes bindings of the operator functions of the preloaded simulated GPU (csrc/simulator/simulator.h)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

__all__ = [
    "CUresult",
    "Draw",
    "Operand",
    "ask",
    "attach",
    "begin_draw",
    "blas_workspace",
    "end_draw",
    "make_current",
    "run",
    "set_manager",
]

CUresult = int
#: Address, size in bytes, and 1 if the operator may write to it, else 0.
Operand = tuple[int, int, int]

#: tms_sim_operand_t: its last member is an int followed by padding.
_OPERAND = struct.Struct("=QQQ")
_SUCCESS = 0


class Draw(ctypes.Structure):
    """The state of PyTorch's generator from which an operator's random seed is drawn (tms_sim_draw_t)."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("addend", ctypes.c_uint64),
        ("captured", ctypes.c_int),
    )


class _Operator(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("gate", ctypes.c_int),
        ("operands", ctypes.c_char_p),
        ("operand_count", ctypes.c_size_t),
        ("request", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
        ("draw", ctypes.POINTER(Draw)),
    )


class _Answer(ctypes.Structure):
    _fields_ = (("text", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Operand(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("written", ctypes.c_int))


# ctypes releases Python's interpreter lock during these calls, some of which wait.
_library = ctypes.CDLL(None)
_library.tms_sim_attach_device_process.argtypes = (ctypes.c_int,)
_library.tms_sim_attach_device_process.restype = None
_library.tms_sim_run_operator.argtypes = (ctypes.POINTER(_Operator),)
_library.tms_sim_ask_operator.argtypes = (ctypes.POINTER(_Operator), ctypes.POINTER(_Answer))
_library.tms_sim_free_answer.argtypes = (ctypes.POINTER(_Answer),)
_library.tms_sim_blas_workspace.argtypes = (ctypes.c_void_p,)
_library.tms_sim_blas_workspace.restype = _Operand
_library.tms_sim_free_answer.restype = None
_library.tms_sim_set_manager.argtypes = (ctypes.c_void_p,)
_library.tms_sim_set_manager.restype = None
_library.tms_sim_begin_draw.argtypes = ()
_library.tms_sim_begin_draw.restype = None
_library.tms_sim_end_draw.argtypes = (ctypes.POINTER(Draw),)


def attach(socket: int) -> None:
    """Pass the socket of the device process to the simulated GPU, which takes ownership."""
    _library.tms_sim_attach_device_process(socket)


def _operator(stream: int, name: str, request: bytes, operands: Sequence[Operand], draw: Draw | None) -> _Operator:
    packed = b"".join([_OPERAND.pack(*operand) for operand in operands])
    drawn = None if draw is None else ctypes.pointer(draw)
    return _Operator(stream, name.encode(), 0, packed, len(operands), request, len(request), drawn)


def run(stream: int, name: str, request: bytes, operands: Sequence[Operand], draw: Draw | None) -> CUresult:
    """Enqueue a request on a stream of the current device, or capture it. Return the CUresult. `name` is for messages."""
    return int(_library.tms_sim_run_operator(ctypes.byref(_operator(stream, name, request, operands, draw))))


def ask(stream: int, name: str, request: bytes, operands: Sequence[Operand], draw: Draw | None) -> tuple[CUresult, bytes]:
    """Enqueue a request and wait for it. Return the CUresult and the answer, which is empty after an error."""
    answer = _Answer()
    description = _operator(stream, name, request, operands, draw)
    result = int(_library.tms_sim_ask_operator(ctypes.byref(description), ctypes.byref(answer)))
    if result != _SUCCESS:
        return result, b""
    try:
        return result, ctypes.string_at(answer.text, answer.bytes)
    finally:
        _library.tms_sim_free_answer(ctypes.byref(answer))


def begin_draw() -> None:
    """Record this thread's launches of random kernels from now on, as the draw of end_draw, in place of running them."""
    _library.tms_sim_begin_draw()


def end_draw() -> Draw | None:
    """Return the arguments of the random kernel that this thread has launched since begin_draw. None: it has launched
    none."""
    draw = Draw()
    return draw if _library.tms_sim_end_draw(ctypes.byref(draw)) == 0 else None


def set_manager(library: str, interface: int) -> None:
    """Have messages about inaccessible memory name tags, which the core in this library knows."""
    get_api = ctypes.CDLL(library).tms_get_api
    get_api.restype = ctypes.c_void_p
    _library.tms_sim_set_manager(get_api(ctypes.c_uint32(interface)))


def make_current(device: int) -> None:
    """Make the primary context of a device current on this thread, as a kernel launch of the runtime does."""
    _library.cudaSetDevice(device)


def blas_workspace(handle: int) -> Operand:
    """Return the workspace of a handle of cuBLAS."""
    workspace = _library.tms_sim_blas_workspace(handle)
    return workspace.address, workspace.bytes, workspace.written
