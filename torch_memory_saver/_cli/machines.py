"""The machines that the demo runs on: the GPU through PyTorch, or the simulated GPU through the CUDA runtime's functions."""

from __future__ import annotations

import ctypes
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch_memory_saver.errors import InvalidStateError

__all__ = ["Buffer", "GpuMachine", "Machine", "SimulatedMachine"]

_MIB = 1 << 20
#: Divisor of the free memory of a GPU. Sizes are multiples of the quotient, and add up to less than the free memory.
_SHARE = 16
_LEAST_FREE = _SHARE * 2 * _MIB


class Buffer(ABC):
    """Device memory in which every byte has the same value."""

    address: int

    @abstractmethod
    def fill(self, value: int) -> None:
        """Set every byte to `value`."""

    @abstractmethod
    def holds(self, value: int) -> bool:
        """Return whether every byte has that value. Waits for the device."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back to the driver."""


class Machine(ABC):
    """A device, and the sizes in bytes that suit it."""

    name: str
    weights_bytes: int
    cache_bytes: int
    trainer_bytes: int
    #: The bytes by which the memory in use may differ between two moments at which it should be the same.
    tolerance: int
    #: Whether the device is too small for weights, cache and trainer together.
    is_full_with_all: bool

    @abstractmethod
    def total_bytes(self) -> int:
        """Return the bytes of the device's memory."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Return the bytes of the device's memory that are in use, by all processes."""

    @abstractmethod
    def allocate(self, size: int, value: int) -> Buffer:
        """Return a buffer of `size` bytes, filled with `value`. Inside a region it is managed, otherwise ordinary."""

    @abstractmethod
    def capture_copy(self, source: Buffer) -> Callable[[], int]:
        """Capture a CUDA graph that reads the last byte of `source`, which holds the weights. Return a function that
        replays the graph and returns the byte that it read."""

    def chart_bytes(self) -> int:
        """Return the bytes that a full bar of the chart stands for."""
        return self.total_bytes()


class _TorchBuffer(Buffer):
    def __init__(self, torch: Any, size: int, value: int) -> None:
        self._torch = torch
        self.tensor = torch.full((size,), value, dtype=torch.uint8, device="cuda")
        self.address = self.tensor.data_ptr()

    def fill(self, value: int) -> None:
        self.tensor.fill_(value)

    def holds(self, value: int) -> bool:
        return bool((self.tensor.min() == value).item() and (self.tensor.max() == value).item())

    def free(self) -> None:
        self.tensor = None
        self._torch.cuda.empty_cache()


class GpuMachine(Machine):
    """The current GPU, through PyTorch."""

    is_full_with_all = False
    tolerance = 64 * _MIB

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.cuda.init()
        self.name = f"the GPU: {self._torch.cuda.get_device_name()}"
        # The first use of the device takes memory for itself, which must not count later.
        _TorchBuffer(self._torch, 2 * _MIB, 1).holds(1)
        self._torch.cuda.synchronize()
        free, _ = self._torch.cuda.mem_get_info()
        # Sizes like an engine's on a large GPU, and smaller ones if little memory is free.
        unit = min(free // _SHARE, 1024 * _MIB) // (2 * _MIB) * (2 * _MIB)
        if not unit:
            raise InvalidStateError(
                f"the demo needs {_LEAST_FREE // _MIB} MiB of free memory on {self.name}, and {free // _MIB} MiB are free: "
                "end other processes there (torch-memory-saver top shows them), or use --device simulated",
                operation="demo",
            )
        self.weights_bytes, self.cache_bytes, self.trainer_bytes = 2 * unit, 4 * unit, 5 * unit

    @staticmethod
    def is_available() -> bool:
        """Return whether PyTorch is installed and finds a GPU."""
        try:
            torch = importlib.import_module("torch")
        except (ImportError, OSError):  # not installed, or its CUDA libraries are missing
            return False
        return bool(torch.cuda.is_available())

    def total_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[1])

    def used_bytes(self) -> int:
        self._torch.cuda.synchronize()
        free, total = self._torch.cuda.mem_get_info()
        return int(total - free)

    def chart_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.trainer_bytes

    def allocate(self, size: int, value: int) -> Buffer:
        return _TorchBuffer(self._torch, size, value)

    def capture_copy(self, source: Buffer) -> Callable[[], int]:
        torch = self._torch
        assert isinstance(source, _TorchBuffer)
        weights = source.tensor
        result = torch.zeros(1, dtype=torch.uint8, device="cuda")
        result.copy_(weights[-1:])  # Loads the kernel, which is not possible during a capture.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_(weights[-1:])

        def replay() -> int:
            graph.replay()
            return int(result.item())

        return replay


class _Runtime:
    """The CUDA runtime's functions in this process. The functions of the preload library come before the simulated ones."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a cudaError_t.

        Raises:
            InvalidStateError: The function failed.
        """
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            error_name = self._library.cudaGetErrorName
            error_name.restype = ctypes.c_char_p
            raise InvalidStateError(f"{name} failed with {error_name(result).decode()}", operation="demo", driver_call=name)


class _RuntimeBuffer(Buffer):
    def __init__(self, runtime: _Runtime, size: int, value: int) -> None:
        self._runtime = runtime
        self.size = size
        address = ctypes.c_void_p()
        runtime.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value or 0
        self.fill(value)

    def fill(self, value: int) -> None:
        self._runtime.call("cudaMemset", ctypes.c_void_p(self.address), value, ctypes.c_size_t(self.size))

    def holds(self, value: int) -> bool:
        host = ctypes.create_string_buffer(self.size)
        self._runtime.call("cudaMemcpy", host, ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), _DEVICE_TO_HOST)
        return host.raw == bytes([value]) * self.size

    def free(self) -> None:
        self._runtime.call("cudaFree", ctypes.c_void_p(self.address))


_DEVICE_TO_HOST = 2
_DEVICE_TO_DEVICE = 3
_CAPTURE_GLOBAL = 0


class SimulatedMachine(Machine):
    """The simulated GPU, in a process started with the preload library and the simulator preloaded."""

    name = "the simulated GPU"
    weights_bytes = 96 * _MIB
    cache_bytes = 192 * _MIB
    trainer_bytes = 256 * _MIB
    tolerance = 0
    is_full_with_all = True

    def __init__(self) -> None:
        self._runtime = _Runtime()
        self._runtime.call("cudaFree", None)  # Creates the context.

    def _memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._runtime.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def total_bytes(self) -> int:
        return self._memory()[1]

    def used_bytes(self) -> int:
        free, total = self._memory()
        return total - free

    def allocate(self, size: int, value: int) -> Buffer:
        return _RuntimeBuffer(self._runtime, size, value)

    def capture_copy(self, source: Buffer) -> Callable[[], int]:
        call = self._runtime.call
        result = _RuntimeBuffer(self._runtime, 1, 0)
        stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cudaStreamCreate", ctypes.byref(stream))
        call("cudaStreamBeginCapture", stream, _CAPTURE_GLOBAL)
        last = ctypes.c_void_p(source.address + self.weights_bytes - 1)
        call("cudaMemcpyAsync", ctypes.c_void_p(result.address), last, ctypes.c_size_t(1), _DEVICE_TO_DEVICE, stream)
        call("cudaStreamEndCapture", stream, ctypes.byref(graph))
        call("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))

        def replay() -> int:
            call("cudaGraphLaunch", executable, stream)
            call("cudaStreamSynchronize", stream)
            byte = ctypes.create_string_buffer(1)
            call("cudaMemcpy", byte, ctypes.c_void_p(result.address), ctypes.c_size_t(1), _DEVICE_TO_HOST)
            return byte.raw[0]

        return replay
