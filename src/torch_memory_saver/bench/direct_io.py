"""Direct I/O on one file, as `dd` does it: what the disk allows, with the number of requests in flight that is best."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["DirectFile"]

#: Of one request.
_BLOCK_BYTES = 16 << 20
#: Requests in flight that are tried.
_DEPTHS = (1, 4, 8)
#: Of the file, when they are.
_TRIED_BYTES = 1 << 30


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
        self.bytes = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(max(_DEPTHS))]
        for buffer in self._buffers:
            # Requests to 4 KiB pages, which lie anywhere, can be a third slower.
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(os.urandom(1 << 16) * (_BLOCK_BYTES >> 16))
        self.direct = True
        self._descriptor = -1
        self._depths = {"write": 1, "read": 1}
        self._open()

    def choose_depths(self) -> None:
        """Writes and reads some of it with each number of requests in flight, and keeps to the fastest from now on."""
        tried = min(self.bytes, _TRIED_BYTES)
        writes, reads = {}, {}
        for depth in _DEPTHS:
            writes[depth] = self._transfer(os.pwritev, depth, tried)
            reads[depth] = self._transfer(os.preadv, depth, tried)
        self._depths = {"write": min(writes, key=lambda depth: writes[depth]), "read": min(reads, key=lambda d: reads[d])}

    @property
    def name(self) -> str:
        how = "direct I/O" if self.direct else "direct I/O is refused: buffered"
        return f"{how}, {self._depths['write']} writes, {self._depths['read']} reads at once"

    def write(self) -> float:
        """Writes all of it. Seconds."""
        return self._transfer(os.pwritev, self._depths["write"], self.bytes)

    def read(self) -> float:
        """Reads it. Seconds."""
        return self._transfer(os.preadv, self._depths["read"], self.bytes)

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

    def _transfer(self, operation: Callable[[int, list[mmap.mmap], int], int], depth: int, size: int) -> float:
        def run(worker: int) -> None:
            buffer = self._buffers[worker]
            for offset in range(worker * _BLOCK_BYTES, size, depth * _BLOCK_BYTES):
                done = operation(self._descriptor, [buffer], offset)
                if done != _BLOCK_BYTES:
                    raise OSError(errno.EIO, f"a request of {_BLOCK_BYTES} bytes ended after {done}")

        with ThreadPoolExecutor(depth) as pool:
            start = time.perf_counter()
            list(pool.map(run, range(depth)))
            return time.perf_counter() - start
