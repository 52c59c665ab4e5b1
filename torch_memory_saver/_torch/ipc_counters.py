"""The counters by which PyTorch knows whether a tensor that was sent is still in use elsewhere.

PyTorch gives each tensor that it sends a 64-bit counter in a file of shared memory. It is 1 when the tensor is sent, and the
importer subtracts 1 when its tensor is gone. PyTorch itself keeps the sender's memory until then. A counter is an estimate:
an importer that is killed never subtracts, and one that receives the same message twice subtracts twice.

A file begins with 64 bytes of PyTorch's mapping, and its numbers are not used again while it exists. Any thread; no lock: a
file may be mapped twice, to no harm.
"""

from __future__ import annotations

import mmap
import os
import struct

__all__ = ["Counters"]

#: Where POSIX shared memory is, as files.
_SHARED_MEMORY = "/dev/shm"
_VALUE = struct.Struct("=q")
_HEADER_BYTES = 64


class Counters:
    """Reads PyTorch's counters."""

    def __init__(self) -> None:
        self._files: dict[bytes, mmap.mmap] = {}

    def is_in_use(self, file: bytes, number: int) -> bool:
        """Whether an importer may still use what was sent with that counter. True if the counter cannot be read."""
        try:
            mapping = self._files.get(file) or self._map(file)
            return bool(_VALUE.unpack_from(mapping, _HEADER_BYTES + number * _VALUE.size)[0] > 0)
        except (OSError, ValueError, struct.error):
            return True

    def keep_only(self, files: set[bytes]) -> None:
        """Unmaps the other files."""
        for file in [file for file in self._files if file not in files]:
            del self._files[file]  # unmapped with its last reference: another thread may be reading it

    def _map(self, file: bytes) -> mmap.mmap:
        descriptor = os.open(os.path.join(_SHARED_MEMORY, os.fsdecode(file).lstrip("/")), os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._files[file] = mapping
        return mapping
