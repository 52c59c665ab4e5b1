"""The memory that the cases pause and resume: torch's tensors, or, on the simulated GPU without PyTorch, cudaMalloc's."""

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
#: What is looked at of each end of a block.
_CHECKED_BYTES = 64 << 10


@dataclass
class Block:
    """Memory of one value, on a device."""

    device: Device
    address: int
    size: int
    value: int
    owner: Any = None

    def fill(self) -> None:
        self.device.fill(self.address, self.size, self.value)

    def is_intact(self) -> bool:
        """Whether both ends hold the value."""
        length = min(_CHECKED_BYTES, self.size)
        return all(
            self.device.read(start, length) == bytes([self.value]) * length
            for start in (self.address, self.address + self.size - length)
        )


class Allocator(ABC):
    """Makes blocks, inside whatever region is in force."""

    #: Whether freed blocks stay in segments that others of them live in, as torch's do.
    caches = False

    @abstractmethod
    def allocate(self, device: Device, size: int, value: int) -> Block:
        """A block, not filled."""

    def on(self, device: Device) -> AbstractContextManager[Any]:
        """Makes the device the current one."""
        device.make_current()
        return nullcontext()

    def reserved_bytes(self) -> int:
        """Of all segments of device 0."""
        return 0


class TorchAllocator(Allocator):
    """Tensors."""

    caches = True

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise DriverFailure("PyTorch finds no GPU")
        self._torch.cuda.init()
        # The allocator is in use, as it is wherever the library is.
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
    """cudaMalloc, which the preloaded library manages."""

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
    """Pairs of sizes, of a block that stays and of the one after it that is freed, so that `part` of the sum stays.

    Sizes of both are spread evenly over the orders of magnitude, multiples of 512 bytes, within [smallest, largest] each.
    """
    chooser = random.Random(seed)
    times = (1 - part) / part  # a dead block is as many times as large as the live one before it
    low, high = max(smallest, smallest / times), min(largest, largest / times)
    pairs: list[tuple[int, int]] = []
    made = 0
    while made < total:
        live = low * (high / low) ** chooser.random()
        pair = (int(live) // 512 * 512, int(live * times) // 512 * 512)
        pairs.append(pair)
        made += sum(pair)
    return pairs
