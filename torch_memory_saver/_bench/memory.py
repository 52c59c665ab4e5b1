"""The memory that the cases pause and resume: PyTorch's tensors, or cudaMalloc's on the simulated GPU without PyTorch."""

from __future__ import annotations

import ctypes
import importlib
import random
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .driver import Device, DriverFailure

__all__ = ["Allocator", "Block", "RuntimeAllocator", "TorchAllocator", "live_and_dead_sizes"]

_MIB = 1 << 20
#: How many bytes at each end of a block are compared.
_CHECKED_BYTES = 64 << 10


@dataclass
class Block:
    """Device memory in which every byte has the same value."""

    device: Device
    address: int
    size: int
    value: int
    owner: Any = None

    def fill(self) -> None:
        self.device.fill(self.address, self.size, self.value)

    def is_intact(self) -> bool:
        """Whether both ends of the block hold the value."""
        length = min(_CHECKED_BYTES, self.size)
        return all(
            self.device.read(start, length) == bytes([self.value]) * length
            for start in (self.address, self.address + self.size - length)
        )


class Allocator(ABC):
    """Allocates blocks in the region that is in force."""

    #: Whether freed blocks stay in segments that also hold live blocks, as PyTorch's do.
    caches = False

    @abstractmethod
    def allocate(self, device: Device, size: int, value: int) -> Block:
        """A block of `size` bytes, which is not filled with `value` yet."""

    def on(self, device: Device) -> AbstractContextManager[Any]:
        """Makes the device the current one, for as long as the context lasts."""
        device.make_current()
        return nullcontext()

    def reserved_bytes(self) -> int:
        """The bytes of all segments of device 0; 0 for an allocator that does not cache."""
        return 0


class TorchAllocator(Allocator):
    """Allocates PyTorch tensors."""

    caches = True

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise DriverFailure("PyTorch finds no GPU")
        self._torch.cuda.init()
        # PyTorch's allocator must be in use, as in every program that uses the library.
        self._torch.empty(1, device="cuda")

    def allocate(self, device: Device, size: int, value: int) -> Block:
        tensor = self._torch.empty(size, dtype=self._torch.uint8, device=f"cuda:{device.ordinal}")
        return Block(device, tensor.data_ptr(), size, value, tensor)

    def on(self, device: Device) -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = self._torch.cuda.device(device.ordinal)
        return manager

    def reserved_bytes(self) -> int:
        return int(self._torch.cuda.memory_reserved(0))


class RuntimeAllocator(Allocator):
    """Calls cudaMalloc, which the preloaded library manages."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(None)

    def allocate(self, device: Device, size: int, value: int) -> Block:
        device.make_current()
        address = ctypes.c_void_p()
        result = self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
        if result != 0 or address.value is None:
            raise DriverFailure(f"cudaMalloc of {size} bytes failed with {result}")
        return Block(device, address.value, size, value)


def live_and_dead_sizes(total: int, part: float, smallest: int, largest: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of sizes in bytes: of a block that stays and of the block after it that is freed. `part` of the sum stays.

    Both sizes are spread evenly over the orders of magnitude. They are multiples of 512 within [smallest, largest].
    """
    chooser = random.Random(seed)
    times = (1 - part) / part  # the size of a dead block divided by that of the live block before it
    low, high = max(smallest, smallest / times), min(largest, largest / times)
    pairs: list[tuple[int, int]] = []
    made = 0
    while made < total:
        live = low * (high / low) ** chooser.random()
        pair = (int(live) // 512 * 512, int(live * times) // 512 * 512)
        pairs.append(pair)
        made += sum(pair)
    return pairs
