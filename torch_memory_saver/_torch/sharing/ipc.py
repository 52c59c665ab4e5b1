"""The formats in which processes of PyTorch share memory: the bytes that describe it, the counters of its users, and the
events on which an importer waits.

Owns the files of counters and the events of streams. Only sent_memory.py calls it, and takes counters with its lock
held.

**The description.** A managed allocation is described as PyTorch describes a segment of its own allocator's expandable
segments, which an importer maps itself. The description begins with a version, and an importer rejects versions that it does
not know. The descriptions of PyTorch 2.6, 2.8, 2.11 and 2.15 were compared. Version 3 came with 2.13 (NVIDIA-NeMo/RL pull
request 4080):

===============  ====================================================================================
version          after the letter ``e``
===============  ====================================================================================
1 (2.6)          process id (32 bits), padding, bytes of a handle, number of handles (64 bits each),
                 then one file descriptor (32 bits) of the exporting process for each handle
2 (2.8, 2.11)    the same
3 (2.15)         with the type of the handles (32 bits, 1: a file descriptor) and padding before them
===============  ====================================================================================

Each importer reads lower versions of its own layout, so 1 stands for 1 and 2. An importer finds what it has mapped by the
bytes of the description. So a nonce follows the descriptors, which importers do not read: the same bytes for the same
physical memory, and other bytes for any other.

**The counters** tell a sender whether a tensor that it has sent is still in use elsewhere. PyTorch sends a tensor with a
64-bit counter in a file of shared memory. It is 1 when the tensor is sent, and the importer subtracts 1 when its tensor is
gone. Managed tensors are sent with counters of this package's own files, because a counter of PyTorch's costs a tensor and
an event of its own. A file has the layout that importers expect: 64 bytes that begin with the number of processes that have
it open, then the counters.

A counter is an estimate: an importer that is killed never subtracts, and one that receives the same message twice subtracts
twice. So no counter is used for a second tensor.

The sender's use of a file never ends before the file is removed: when no counter of it is in use any more, or at the end of
the process. Importers that have opened it keep it.

**The events.** An importer waits before it reads what was sent. An event is recorded on the current stream when a tensor is
sent, and the importer's stream waits for it. PyTorch makes a new event for each tensor, and at most 1000 of them. Here a
stream has one event, which is recorded again at each send. That is enough: a wait for the event waits for its latest
record, and on one stream a later record is reached after an earlier one (CUDA's documentation of cuStreamWaitEvent and of
interprocess events).

Streams that PyTorch owns are never destroyed, and there are few. A stream from elsewhere may be destroyed and its address
used again, so each send on it has an event of its own, which is kept for as long as what was sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = [
    "CounterFile",
    "Counters",
    "Recorded",
    "StreamEvents",
    "check_importer",
    "describe",
    "format_of_importer",
    "format_of_own_description",
]

_KIND = b"e"
_FILE_DESCRIPTOR = 1
#: The layouts after the letter, by the version that a description names: struct formats without the descriptor.
_LAYOUTS = {1: "<i4xQQ", 3: "<i4xQQi4x"}
#: The format that an importer of PyTorch from that release on reads.
_SINCE = (((2, 13), 3), ((2, 6), 1))
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:[.+a-z].*)?")


def format_of_own_description(description: bytes) -> int:
    """Return the format in which the PyTorch that wrote `description` describes segments.

    Raises:
        InvalidStateError: Its version is not known.
    """
    version = description[0]
    if version in (1, 2):
        return 1
    if version in _LAYOUTS:
        return version
    raise InvalidStateError(
        f"share: this PyTorch describes shared memory by version {version} of its format, and this release of "
        f"torch_memory_saver knows versions 1 to {max(_LAYOUTS)}. Update torch_memory_saver, or send tensor.cpu()",
        operation="share",
    )


def check_importer(release: object) -> str | None:
    """Check the release of an importer's PyTorch, such as "2.11" or None, and return it.

    Raises:
        InvalidArgumentError: `release` is no release, or one that cannot import managed memory.
    """
    if release is not None:
        format_of_importer(release)
    return None if release is None else str(release)


def format_of_importer(release: object) -> int:
    """Return the format that an importer with that release of PyTorch reads.

    Raises:
        InvalidArgumentError: `release` is no release, or is before 2.6, the oldest that was tested.
    """
    match = _RELEASE.fullmatch(release) if isinstance(release, str) else None
    if match is None:
        raise InvalidArgumentError(f'share_for must be None or a release of PyTorch such as "2.11", not {release!r}')
    number = int(match[1]), int(match[2])
    for since, layout in _SINCE:
        if number >= since:
            return layout
    raise InvalidArgumentError(f"share_for: managed memory can be sent to PyTorch 2.6 and later, not to {release}")


def describe(layout: int, exported: Sequence[_core.Export], nonce: bytes) -> bytes:
    """Return the description of exported memory, in one of the formats. Several pieces lie side by side and have the same
    size. Importers do not read the `nonce`, which tells processes with the same id apart."""
    fields: tuple[int, ...] = (os.getpid(), exported[0].bytes, len(exported))
    if layout >= 3:
        fields += (_FILE_DESCRIPTOR,)
    header = struct.pack(_LAYOUTS[layout], *fields)
    descriptors = struct.pack(f"<{len(exported)}i", *(piece.descriptor for piece in exported))
    generations = struct.pack(f"<{len(exported)}Q", *(piece.generation for piece in exported))
    return bytes([layout]) + _KIND + header + descriptors + nonce + generations


#: The folder in which POSIX shared memory appears as files.
_SHARED_MEMORY = "/dev/shm"
_HEADER_BYTES = 64
_USERS = struct.Struct("=i")
_VALUE = struct.Struct("=q")
#: Counters in a file, as many as importers map: PyTorch's CUDA_IPC_REF_COUNTER_FILE_SIZE.
_COUNTERS = 10_000
_FILE_BYTES = _HEADER_BYTES + _COUNTERS * _VALUE.size


class CounterFile:
    """A file of counters. It is removed with its last reference, or at the end of the process that created it.

    Attributes:
        name: The name of the POSIX shared memory.
    """

    def __init__(self) -> None:
        """Create the file.

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
        """Return the number of a counter that has not been used. Its value is 1.

        Raises:
            IndexError: No counter is left.
        """
        if self._taken == _COUNTERS:
            raise IndexError
        self._taken += 1
        return self._taken - 1

    def is_in_use(self, number: int) -> bool:
        """Return whether an importer may still use what was sent with that counter."""
        return bool(_VALUE.unpack_from(self._mapping, _HEADER_BYTES + number * _VALUE.size)[0] > 0)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody has cleaned up
        os.unlink(path)


class Counters:
    """The file from which counters are taken, and its successors. The caller excludes other threads."""

    def __init__(self) -> None:
        self._file: CounterFile | None = None

    def take(self) -> tuple[CounterFile, int]:
        """Return a new counter, whose value is 1, as its file and its number. Keep the file for as long as the counter is
        read.

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


class Recorded(NamedTuple):
    """An event that was recorded.

    Attributes:
        handle: The handle that importers open.
        event: The event. Keep it for as long as an importer may open the handle.
    """

    handle: bytes
    event: Any


class _StreamEvent(NamedTuple):
    stream: Any
    recorded: Recorded


class StreamEvents:
    """The events of this process. Any thread may call. There is no lock: a stream's event is set by a single operation of a
    dict."""

    def __init__(self) -> None:
        self._events: dict[tuple[int, ...], _StreamEvent] = {}  # by device and PyTorch's id of the stream

    def record(self, torch: Any, device: int) -> Recorded:
        """Record an event on the stream that is the device's current one."""
        key: tuple[int, ...] = torch._C._cuda_getCurrentStream(device)
        known = self._events.get(key)
        if known is not None:
            known.recorded.event.record(known.stream)
            return known.recorded
        made = self._make(torch, device)
        if not _is_external(key[0]):
            self._events.setdefault(key, made)
        return made.recorded

    @staticmethod
    def _make(torch: Any, device: int) -> _StreamEvent:
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event(interprocess=True)
        event.record(stream)
        return _StreamEvent(stream, Recorded(event.ipc_handle(), event))


def _is_external(stream_id: int) -> bool:
    """Return whether a stream does not belong to PyTorch. Its id is a pointer then, which is even; PyTorch's own ids are
    odd, and 0 is the default stream (c10/cuda/CUDAStream.cpp)."""
    return stream_id != 0 and stream_id % 2 == 0
