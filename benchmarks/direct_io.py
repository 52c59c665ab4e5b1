"""The limit of disk backups: direct I/O on one file, as `dd` does it, with requests of the fastest size and number."""

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
    """How many requests are in flight at once, and how many bytes each has."""

    requests: int
    bytes: int

    def __str__(self) -> str:
        size = f"{self.bytes >> 20} MiB" if self.bytes >= 1 << 20 else f"{self.bytes >> 10} KiB"
        return f"{self.requests} x {size}"


#: The ways that are tried, because virtual disks differ in which is fastest. The last is a backup's own way: without it a
#: backup could be faster than its limit.
_WAYS = (
    *(_Way(1, 16 << 20), _Way(4, 16 << 20), _Way(8, 4 << 20)),
    *(_Way(2, 4 << 20), _Way(8, 1 << 20), _Way(16, 512 << 10)),
)
_LARGEST_BYTES = max(way.bytes for way in _WAYS)
#: How many bytes of the file a trial transfers, and how often each way is tried: the speed of a disk varies over time.
_TRIED_BYTES = 1 << 30
_TRIALS = 3


class DirectFile:
    """A file of `size` bytes in a directory, which is written and read past the page cache.

    The file has no name. Its space is reserved once: if it were made again, the file system would discard the old blocks
    during the next measurement.

    If the file system refuses direct I/O, `direct` is False and the page cache is used.

    Raises:
        OSError: The directory does not exist, or has too little space.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._directory = directory
        # Direct I/O transfers whole blocks only.
        self.bytes = -(-size // _LARGEST_BYTES) * _LARGEST_BYTES
        self._buffers = [mmap.mmap(-1, _LARGEST_BYTES) for _ in range(max(way.requests for way in _WAYS))]
        for buffer in self._buffers:
            # Requests on scattered pages of 4 KiB can be a third slower.
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(os.urandom(1 << 16) * (_LARGEST_BYTES >> 16))
        self.direct = True
        self._descriptor = -1
        self._ways = {"write": _WAYS[0], "read": _WAYS[0]}
        self._open()

    def choose_ways(self) -> None:
        """Times every way on a part of the file, in turns. From now on the ways with the smallest median are used."""
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
        """Writes the whole file. Returns the seconds that it took."""
        return self._transfer(os.pwritev, self._ways["write"], self.bytes)

    def read(self) -> float:
        """Reads the whole file. Returns the seconds that it took."""
        return self._transfer(os.preadv, self._ways["read"], self.bytes)

    def close(self) -> None:
        """Closes the file, which also deletes it, because it has no name."""
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
