"""The counters that tell a sender whether a tensor that it has sent is still in use elsewhere.

PyTorch sends a tensor with a 64-bit counter in a file of shared memory. It is 1 when the tensor is sent, and the importer
subtracts 1 when its tensor is gone. Managed tensors are sent with counters of this package's own files, because a counter of
PyTorch's costs a tensor and an event of its own. A file has the layout that importers expect: 64 bytes that begin with the
number of processes that have it open, then the counters.

A counter is an estimate: an importer that is killed never subtracts, and one that receives the same message twice subtracts
twice. So no counter is used for a second tensor.

The sender's use of a file never ends before the file is removed: when no counter of it is in use any more, or at the end of
the process. Importers that have opened it keep it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct

from torch_memory_saver.errors import InvalidStateError

__all__ = ["CounterFile", "Counters"]

#: Where POSIX shared memory is, as files.
_SHARED_MEMORY = "/dev/shm"
_HEADER_BYTES = 64
_USERS = struct.Struct("=i")
_VALUE = struct.Struct("=q")
#: As many as importers map: PyTorch's CUDA_IPC_REF_COUNTER_FILE_SIZE.
_COUNTERS = 10_000
_FILE_BYTES = _HEADER_BYTES + _COUNTERS * _VALUE.size


class CounterFile:
    """A file of counters. It is removed with its last reference, or at the end of the process that created it.

    Attributes:
        name: The name of the POSIX shared memory.
    """

    def __init__(self) -> None:
        """
        Raises:
            OSError: No such file can be created, or no memory is left for it.
        """
        from multiprocessing.util import Finalize  # slow, but torch has imported it already

        name = f"torch_memory_saver_{os.getpid()}_{secrets.token_hex(8)}"
        path = os.path.join(_SHARED_MEMORY, name)
        self.name = f"/{name}".encode()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Does nothing in a forked child. It also runs at the end of a process that multiprocessing has started.
            self._remove = Finalize(self, _remove, (path,), exitpriority=0)
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)
            self._mapping = mmap.mmap(descriptor, _FILE_BYTES)
        finally:
            os.close(descriptor)
        _USERS.pack_into(self._mapping, 0, 1)
        self._mapping[_HEADER_BYTES:_FILE_BYTES] = _VALUE.pack(1) * _COUNTERS
        self._taken = 0

    def take(self) -> int:
        """The number of a counter that has not been used, which is 1.

        Raises:
            IndexError: There is none left.
        """
        if self._taken == _COUNTERS:
            raise IndexError
        self._taken += 1
        return self._taken - 1

    def is_in_use(self, number: int) -> bool:
        """Whether an importer may still use what was sent with that counter."""
        return bool(_VALUE.unpack_from(self._mapping, _HEADER_BYTES + number * _VALUE.size)[0] > 0)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody has cleaned up
        os.unlink(path)


class Counters:
    """The file from which counters are taken, and its successors. The caller excludes other threads."""

    def __init__(self) -> None:
        self._file: CounterFile | None = None

    def take(self) -> tuple[CounterFile, int]:
        """A new counter, which is 1. Keep the file for as long as the counter is read.

        Raises:
            InvalidStateError: There is no shared memory for another file.
        """
        if self._file is not None:
            try:
                return self._file, self._file.take()
            except IndexError:
                pass
        try:
            self._file = CounterFile()
        except OSError as error:
            raise InvalidStateError(
                f"share: a file of {_FILE_BYTES} bytes of shared memory cannot be created ({error}). Free some of "
                f"{_SHARED_MEMORY}, or give the container more (docker run --shm-size)",
                operation="share",
            ) from error
        return self._file, self._file.take()
