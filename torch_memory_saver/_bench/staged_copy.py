"""The speed of backups that are not pinned: copies go through a ring of pinned buffers.

Pinning and unpinning wait for the driver. Here only the ring is pinned, and only once. Threads copy between the ring and
pageable memory while the bus transfers other buffers. On the way out the pageable memory is new, as in a first pause.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from .driver import Device, HostMemory, OrdinaryMemory, call

__all__ = ["StagedCopy"]

_BUFFER_BYTES = 8 << 20
_BUFFERS = 24
_MOST_THREADS = 16
_DISABLE_TIMING = 2


class StagedCopy:
    """Copies `size` bytes of a device through the ring, which is made before anything is timed.

    Raises:
        DriverFailure: The device or the host has too little memory.
    """

    name = "through pinned buffers"

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._size = size
        self._address = device.allocate(size)
        device.fill(self._address, size, 1)
        self._ring = HostMemory(min(_BUFFERS * _BUFFER_BYTES, size))
        starts = range(self._ring.address, self._ring.address + self._ring.bytes, _BUFFER_BYTES)
        self._buffers = [(start, ctypes.c_void_p()) for start in starts]
        for _, event in self._buffers:
            call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), initializer=device.make_current)
        # All threads start before anything is timed.
        list(self._threads.map(lambda _: self._device.make_current(), range(_MOST_THREADS)))
        self.host: OrdinaryMemory | None = None

    def out(self) -> None:
        """Copies from the device to new pageable memory."""
        self.forget()
        host = self.host = OrdinaryMemory(self._size)
        idle: SimpleQueue[tuple[int, ctypes.c_void_p]] = SimpleQueue()
        for buffer in self._buffers:
            idle.put(buffer)

        def store(offset: int, size: int, buffer: int, event: ctypes.c_void_p) -> None:
            call("cuEventSynchronize", event)
            ctypes.memmove(host.address + offset, buffer, size)
            idle.put((buffer, event))

        def start(offset: int, size: int) -> Future[None]:
            buffer, event = idle.get()
            self._device.start_piece_out(buffer, self._address + offset, size, event)
            return self._threads.submit(store, offset, size, buffer, event)

        self._for_all(start)

    def back(self) -> None:
        """Copies from that memory to the device, and then releases it."""
        host = self.host
        assert host is not None, "nothing was copied out"
        in_use: list[Future[None] | None] = [None] * len(self._buffers)
        number = 0

        def load(offset: int, size: int, before: Future[None] | None, buffer: int, event: ctypes.c_void_p) -> None:
            if before is not None:
                before.result()
                call("cuEventSynchronize", event)  # the copy of the buffer's previous piece
            ctypes.memmove(buffer, host.address + offset, size)
            self._device.start_piece_back(self._address + offset, buffer, size, event)

        def start(offset: int, size: int) -> Future[None]:
            nonlocal number
            index = number % len(self._buffers)
            number += 1
            in_use[index] = done = self._threads.submit(load, offset, size, in_use[index], *self._buffers[index])
            return done

        self._for_all(start)
        self._device.wait_for_copies()
        self.forget()

    def _for_all(self, start: Callable[[int, int], Future[None]]) -> None:
        self._device.make_current()
        offsets = range(0, self._size, _BUFFER_BYTES)
        for done in [start(offset, min(_BUFFER_BYTES, self._size - offset)) for offset in offsets]:
            done.result()

    def forget(self) -> None:
        """Releases the pageable memory."""
        if self.host is not None:
            self.host.close()
            self.host = None

    def close(self) -> None:
        self.forget()
        self._threads.shutdown()
        for _, event in self._buffers:
            call("cuEventDestroy_v2", event)
        self._ring.close()
        self._device.free(self._address)
