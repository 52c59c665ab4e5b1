"""Direct I/O on one file, as `dd` does it: what the disk allows, with the requests that are best."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

__all__ = ["DirectFile"]


@dataclass(frozen=True)
class _Way:
    """So many requests at once, of so many bytes each."""

    requests: int
    bytes: int

    def __str__(self) -> str:
        size = f"{self.bytes >> 20} MiB" if self.bytes >= 1 << 20 else f"{self.bytes >> 10} KiB"
        return f"{self.requests} x {size}"


#: Those that are tried: virtual disks differ in which they like. The last is what a backup does, which would else be held
#: against a limit that it can pass.
_WAYS = (
    *(_Way(1, 16 << 20), _Way(4, 16 << 20), _Way(8, 4 << 20)),
    *(_Way(2, 4 << 20), _Way(8, 1 << 20), _Way(16, 512 << 10)),
)
_LARGEST_BYTES = max(way.bytes for way in _WAYS)
#: Of the file, when they are, and how often: disks get faster and slower meanwhile.
_TRIED_BYTES = 1 << 30
_TRIALS = 3


class DirectFile:
    """A file of `size` bytes in a directory, which is written and read past the page cache. It has no name, and its space is
    reserved once: making it anew would have the file system discard the old one's blocks beside what is measured next.

    Where the file system refuses direct I/O, `direct` is False and the page cache is used.

    Raises:
        OSError: The directory is not there, or has no room.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._directory = directory
        # Direct I/O takes whole blocks only.
        self.bytes = -(-size // _LARGEST_BYTES) * _LARGEST_BYTES
        self._buffers = [mmap.mmap(-1, _LARGEST_BYTES) for _ in range(max(way.requests for way in _WAYS))]
        for buffer in self._buffers:
            # Requests to 4 KiB pages, which lie anywhere, can be a third slower.
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(os.urandom(1 << 16) * (_LARGEST_BYTES >> 16))
        self.direct = True
        self._descriptor = -1
        self._ways = {"write": _WAYS[0], "read": _WAYS[0]}
        self._open()

    def choose_ways(self) -> None:
        """Writes and reads some of it in each way, in turns, and keeps to those with the smallest median from now on."""
        tried = min(self.bytes, _TRIED_BYTES)
        seconds: dict[str, dict[_Way, list[float]]] = {"write": {}, "read": {}}
        for _ in range(_TRIALS):
            for way in _WAYS:
                seconds["write"].setdefault(way, []).append(self._transfer(os.pwritev, way, tried))
                seconds["read"].setdefault(way, []).append(self._transfer(os.preadv, way, tried))
        self._ways = {kind: min(tries, key=lambda way: median(tries[way])) for kind, tries in seconds.items()}

    @property
    def name(self) -> str:
        how = "direct I/O" if self.direct else "direct I/O is refused: buffered"
        return f"{how}, writes {self._ways['write']}, reads {self._ways['read']}"

    def write(self) -> float:
        """Writes all of it. Seconds."""
        return self._transfer(os.pwritev, self._ways["write"], self.bytes)

    def read(self) -> float:
        """Reads it. Seconds."""
        return self._transfer(os.preadv, self._ways["read"], self.bytes)

    def close(self) -> None:
        """The file goes with its descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        created, path = tempfile.mkstemp(prefix="torch_memory_saver_bench_", dir=self._directory)
        os.close(created)
        try:
            try:
                self._descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if self.direct else 0))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                self._descriptor = os.open(path, os.O_RDWR)
        finally:
            os.unlink(path)
        os.posix_fallocate(self._descriptor, 0, self.bytes)

    def _transfer(self, operation: Callable[[int, list[memoryview], int], int], way: _Way, size: int) -> float:
        def run(worker: int) -> None:
            with memoryview(self._buffers[worker]) as buffer, buffer[: way.bytes] as part:
                for offset in range(worker * way.bytes, size, way.requests * way.bytes):
                    done = operation(self._descriptor, [part], offset)
                    if done != way.bytes:
                        raise OSError(errno.EIO, f"a request of {way.bytes} bytes ended after {done}")

        with ThreadPoolExecutor(way.requests) as pool:
            start = time.perf_counter()
            list(pool.map(run, range(way.requests)))
            return time.perf_counter() - start
