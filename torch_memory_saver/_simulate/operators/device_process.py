"""The device process, which runs operators' CPU implementations on the memory of the simulated devices.

It is forked from the program after torch was imported, and exits when its socket is closed. The messages are described in
csrc/simulator/operators/channel.h. It maps the program's memory at its own addresses. A reservation of the program is one
contiguous range here too, so a tensor that spans several pieces of physical memory is contiguous.
"""

from __future__ import annotations

import array
import bisect
import ctypes
import mmap
import os
import socket
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from torch_memory_saver._simulate.operators.compute import compute, writes_results
from torch_memory_saver._simulate.operators.refusals import tensors_in
from torch_memory_saver._simulate.operators.wire import Fresh, Place, Settings, Shape, Value, decode, encode

__all__ = ["Memory", "Server", "serve"]

_MESSAGE = struct.Struct("=IIQQ")
_PLACED = struct.Struct("=QQQQQQ")
_FORGOTTEN = struct.Struct("=QQ")
_FILE, _RUN, _FORGET = 1, 2, 3
_DONE, _FAILED = 0, 1
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(address: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
    result = _libc.mmap(address, size, protection, flags, file, offset)
    if result == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {size} bytes: {os.strerror(error)}")
    return int(result)


class Memory:
    """This process's mappings of device memory."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        #: Start of a range in the program -> (bytes, local address).
        self._ranges: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        #: Address of a mapping in the program -> (bytes, file, offset).
        self._placed: dict[int, tuple[int, int, int]] = {}

    def add_file(self, name: int, descriptor: int) -> None:
        """Take ownership of the descriptor. Reopen the file, because the received open file description may hold the lock
        that marks exported memory as used. Use by this process must not count."""
        self._files[name] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        os.close(descriptor)

    def place(self, start: int, span: int, address: int, size: int, file: int, offset: int) -> None:
        """Map `size` bytes of a file at the local equivalent of `address`, in the range of `span` bytes at `start`.

        Raises:
            OSError: The system refuses the mapping.
        """
        wanted = (size, file, offset)
        if self._placed.get(address) == wanted and self._ranges.get(start, (0, 0))[0] == span:
            return
        if self._ranges.get(start, (0, 0))[0] != span:
            self._new_range(start, span)
        self._forget(address, size)
        local = self._ranges[start][1] + address - start
        _map(local, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._files[file], offset)
        self._placed[address] = wanted

    def forget(self, start: int, file: int) -> None:
        """Unmap a range that the program has released, and unmap and close a file. 0 means none."""
        if start in self._ranges:
            self._drop_ranges(start, 1)
        if file in self._files:
            for address in [at for at, (_, used, _) in self._placed.items() if used == file]:
                size = self._placed.pop(address)[0]
                _map(self.local(address), size, 0, _NOTHING | _MAP_FIXED, -1, 0)
            os.close(self._files.pop(file))

    def local(self, address: int) -> int:
        """Return the local address for an address in the program, which must be in a known range."""
        start = self._starts[bisect.bisect_right(self._starts, address) - 1]
        return self._ranges[start][1] + address - start

    def _drop_ranges(self, start: int, span: int) -> None:
        for other, (size, local) in list(self._ranges.items()):
            if other < start + span and start < other + size:
                _libc.munmap(local, size)
                del self._ranges[other]
                self._forget(other, size)
        self._starts = sorted(self._ranges)

    def _new_range(self, start: int, span: int) -> None:
        self._drop_ranges(start, span)
        self._ranges[start] = (span, _map(None, span, 0, _NOTHING, -1, 0))
        self._starts = sorted(self._ranges)

    def _forget(self, address: int, size: int) -> None:
        overlapping = [
            at for at, (bytes_there, _, _) in self._placed.items() if at < address + size and address < at + bytes_there
        ]
        for at in overlapping:
            del self._placed[at]


class _Operator:
    """An operator and its out= overload, if it has one.

    Attributes:
        call: The operator.
        write: The out= overload, or None.
        outputs: The names of the overload's output arguments; empty without an overload.
    """

    def __init__(self, name: str) -> None:
        packet, _, overload = name.partition("::")[2].partition(".")
        overloads = getattr(torch.ops.aten, packet)
        self.call = getattr(overloads, overload or "default")
        self.write: Any = None
        self.outputs: list[str] = []
        wanted = [(each.name, str(each.type)) for each in self.call._schema.arguments]
        for other in overloads.overloads():
            arguments = getattr(overloads, other)._schema.arguments
            outputs = [each.name for each in arguments if each.is_out]
            # A loss with out= resizes its result to the shape before the reduction.
            is_loss = "reduction" in [each.name for each in arguments]
            if outputs and not is_loss and [(each.name, str(each.type)) for each in arguments if not each.is_out] == wanted:
                self.write, self.outputs = getattr(overloads, other), outputs


class Server:
    """Executes requests, one at a time."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._operators: dict[str, Any] = {}
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._next_kept = 1
        self._settings: Settings | None = None

    def answer(self, request: bytes, number: int = 0) -> tuple[int, bytes]:
        """Execute a request. Return the status and the content of the reply.

        An exception of the operator is part of the reply. `number` is the seed of a random operator.
        """
        fields = decode(request)
        name, results = fields[0], fields[4]
        try:
            values = self._run(number, *fields)
        except Exception as error:  # the program receives any error of its operator
            if results is None:
                return _FAILED, encode((type(error), str(error)))
            return _FAILED, f"{name} failed on the device: {type(error).__name__}: {error}".encode()
        return _DONE, encode(values) if results is None else b""

    def _run(
        self,
        number: int,
        name: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any] | None,
        shapes: tuple[Shape, ...],
        results: tuple[int | None, ...] | None,
        random: bool,
        kept: int | None,
        settings: Settings | None,
    ) -> Any:
        self._apply(settings)
        tensors = self._tensors(shapes)
        if kept is not None:
            self._store(tensors, results or (), self._kept.pop(kept))
            return None
        seed = number if random else None
        operator = self._operators.get(name)
        if operator is None:
            operator = self._operators[name] = _Operator(name)
        given, named = _fill(arguments, tensors), _fill(keywords or {}, tensors)
        has_overload = operator.outputs and len(results or ()) == len(operator.outputs)
        if results and has_overload and writes_results(operator.call, given):
            _seed(seed)
            if self._write(operator, given, named, results, tensors, shapes):
                return None
            tensors = self._tensors(shapes)  # the attempt may have resized them
            given, named = _fill(arguments, tensors), _fill(keywords or {}, tensors)
        _seed(seed)
        values = compute(operator.call, given, named)
        if results is None:
            return self._keep(values)
        if results:
            self._store(tensors, results, _aligned(values, len(results)))
        return None

    def _write(
        self,
        operator: _Operator,
        given: list[Any],
        named: dict[str, Any],
        results: tuple[int | None, ...],
        tensors: list[torch.Tensor],
        shapes: tuple[Shape, ...],
    ) -> bool:
        """Run the out= overload on the result tensors. False if it fails or a result is an argument: the CPU's results may
        have another type or shape than CUDA's."""
        places = [place for place in results if place is not None]
        if len(places) != len(results):
            return False
        to = {each: tensors[place] for each, place in zip(operator.outputs, places, strict=True)}
        try:
            operator.write(*given, **named, **to)
        except RuntimeError:
            return False
        # The operator may choose other strides, as it does for results that it allocates.
        if any(tensors[place].stride() != shapes[place].stride for place in places):
            values = [each.clone() for each in to.values()]
            self._store(self._tensors(shapes), results, values)
        return True

    def _tensors(self, shapes: tuple[Shape, ...]) -> list[torch.Tensor]:
        storages: dict[int, torch.UntypedStorage] = {}
        made = []
        for storage, size, offset, dtype, shape, stride, conjugate, negative in shapes:
            there = storages.get(storage)
            if there is None:
                there = storages[storage] = _storage(self.memory.local(storage) if size else 0, size)
            tensor = torch.empty(0, dtype=dtype).set_(there, offset, shape, stride)
            if conjugate:
                tensor = torch._conj(tensor)
            made.append(torch._neg_view(tensor) if negative else tensor)
        return made

    @staticmethod
    def _store(tensors: list[torch.Tensor], places: tuple[int | None, ...], values: Sequence[torch.Tensor | None]) -> None:
        for place, value in zip(places, values, strict=True):
            if place is None:
                continue
            to = tensors[place]
            # CUDA fills an unused result. The CPU returns an empty tensor or none.
            if value is None or (not value.numel() and to.numel()):
                to.zero_()
                continue
            if to.shape != value.shape:
                raise RuntimeError(f"a result has the shape {tuple(value.shape)}, and {tuple(to.shape)} was expected")
            to.copy_(value)

    def _keep(self, values: Any) -> Any:
        """Keep the tensors among the values for a later request. Return their key, their shapes, and the values with each
        tensor replaced by a Place; the key is None if there are no tensors."""
        tensors = tensors_in(values)
        if not tensors:
            return None, (), values
        key = self._next_kept
        self._next_kept += 1
        self._kept[key] = tensors
        described = tuple(Shape(0, 0, 0, each.dtype, tuple(each.shape), tuple(each.stride())) for each in tensors)
        counter = iter(range(len(tensors)))
        return key, described, _replace(values, counter)

    def _apply(self, settings: Settings | None) -> None:
        if settings is None or settings == self._settings:
            return
        self._settings = settings
        torch.set_default_dtype(settings.default_dtype)
        if torch.get_num_threads() != settings.threads:
            torch.set_num_threads(settings.threads)
        # torch.use_deterministic_algorithms would import the compiler, which takes a second.
        torch._C._set_deterministic_algorithms(settings.deterministic, warn_only=True)


def _aligned(values: Any, count: int) -> list[torch.Tensor | None]:
    """Return the results of an operator, with None for a result that the CPU leaves out and CUDA fills."""
    every = list(values) if isinstance(values, (list, tuple)) else [values]
    return every if len(every) == count and None in every else tensors_in(values)


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.default_generator.manual_seed(seed)


def _storage(address: int, size: int) -> torch.UntypedStorage:
    made: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), size)
    return made


def _replace(values: Any, places: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return Place(next(places))
    if isinstance(values, (list, tuple)):
        return [_replace(value, places) for value in values]
    return values


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the argument with each Place, Value and Fresh replaced by a tensor."""
    kind = type(value)
    if kind is Place:
        return tensors[value.number]
    if kind is Value:
        return value.data if value.dtype is None else torch.tensor(value.data, dtype=value.dtype)
    if kind is Fresh:
        return torch.empty(0, dtype=value.dtype)
    if kind is tuple or kind is list:
        return [_fill(each, tensors) for each in value]
    if kind is dict:
        return {name: _fill(each, tensors) for name, each in value.items()}
    return value


class _Closed(Exception):
    """The program has exited or has attached another device process."""


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise _Closed
        view = view[got:]
    return data


def _receive_message(connection: socket.socket) -> tuple[int, int, int, int, int]:
    """Return kind, count, size in bytes and random number of the next message, and the received file descriptor or -1. The
    caller owns the descriptor."""
    space = socket.CMSG_SPACE(array.array("i").itemsize)
    data, control, _, _ = connection.recvmsg(_MESSAGE.size, space)
    if not data:
        raise _Closed
    descriptor = -1
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            (descriptor,) = array.array("i", content)
    if len(data) < _MESSAGE.size:
        data += bytes(_receive(connection, _MESSAGE.size - len(data)))
    return (*_MESSAGE.unpack(data), descriptor)


def serve(connection: socket.socket) -> None:
    """Execute requests until the socket is closed."""
    memory = Memory()
    server = Server(memory)
    torch.set_grad_enabled(False)
    # The program gets this warning when it creates such a tensor.
    warnings.filterwarnings("ignore", message="B?Complex(Half|32) support is experimental")
    try:
        while True:
            kind, count, size, number, descriptor = _receive_message(connection)
            if kind == _FILE:
                memory.add_file(size, descriptor)
                continue
            if kind == _FORGET:
                for forgotten in _FORGOTTEN.iter_unpack(_receive(connection, count * _FORGOTTEN.size)):
                    memory.forget(*forgotten)
                continue
            for placed in _PLACED.iter_unpack(_receive(connection, count * _PLACED.size)):
                memory.place(*placed)
            status, text = server.answer(bytes(_receive(connection, size)), number)
            connection.sendall(_MESSAGE.pack(status, 0, len(text), 0) + text)
    except (_Closed, ConnectionError):
        return
