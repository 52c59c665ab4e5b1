"""Stand-ins for what sending a tensor uses of PyTorch."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from torch_memory_saver._torch.sharing import ipc

__all__ = ["FakeEvent", "FakeStorage", "FakeStream", "FakeTorch", "add", "fall", "reset"]

HEADER_BYTES, COUNTER_BYTES = 64, 8


def add(files: Path, name: bytes, number: int, difference: int) -> int:
    """Changes a counter as an importer does; its value."""
    with (files / name.decode().lstrip("/")).open("r+b") as file:
        place = HEADER_BYTES + number * COUNTER_BYTES
        file.seek(place)
        value = int(struct.unpack("q", file.read(COUNTER_BYTES))[0]) + difference
        file.seek(place)
        file.write(struct.pack("q", value))
    return value


def fall(fields: tuple[Any, ...]) -> None:
    """An importer drops its tensor."""
    add(FakeTorch.files, fields[4], fields[5], -1)


class FakeStream:
    """Stands for torch.cuda.Stream. An even id is that of a stream which does not belong to PyTorch."""

    current: ClassVar[tuple[int, int, int]] = (0, 0, 1)  # id, device, type


class FakeEvent:
    """Stands for torch.cuda.Event."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, interprocess: bool) -> None:
        assert interprocess
        self.records: list[tuple[int, int, int]] = []
        FakeEvent.made.append(self)

    def record(self, stream: tuple[int, int, int]) -> None:
        self.records.append(stream)

    def ipc_handle(self) -> bytes:
        assert self.records, "made on the device of its stream"
        return b"event%d" % FakeEvent.made.index(self)


class FakeStorage:
    """Stands for torch.UntypedStorage."""

    imported: ClassVar[list[tuple[Any, ...]]] = []
    released: ClassVar[list[tuple[bytes, int]]] = []
    refuses = ""
    counts = True

    def __init__(self, size: int, device: object = None, address: int = 0) -> None:
        self.size, self.address = size, address

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.address

    @classmethod
    def _new_shared_cuda(cls, *fields: Any) -> None:
        if cls.refuses:
            raise RuntimeError(f"{cls.refuses}\nStack trace")
        cls.imported.append(fields)
        if cls.counts:
            fall(fields)

    @classmethod
    def _release_ipc_counter_cuda(cls, file: bytes, number: int) -> None:
        cls.released.append((file, number))


class FakeTorch:
    """Stands for torch."""

    __version__ = "2.11.0"
    UntypedStorage = FakeStorage
    shared: ClassVar[list[FakeStorage]] = []
    files: ClassVar[Path]
    capturing: ClassVar[set[int]] = set()
    ordinary = 0
    current = 0

    class cuda:
        Event = FakeEvent

        @staticmethod
        def is_current_stream_capturing() -> bool:
            return FakeTorch._C._cuda_isCurrentStreamCapturing()

        @staticmethod
        def current_stream(device: int) -> tuple[int, int, int]:
            return FakeStream.current

        @staticmethod
        @contextlib.contextmanager
        def device(index: int) -> Iterator[None]:
            before, FakeTorch.current = FakeTorch.current, index
            yield
            FakeTorch.current = before

    class _C:
        @staticmethod
        def _cuda_getDevice() -> int:
            return FakeTorch.current

        @staticmethod
        def _cuda_isCurrentStreamCapturing() -> bool:
            return FakeTorch.current in FakeTorch.capturing

        @staticmethod
        def _cuda_getCurrentStream(device: int) -> tuple[int, int, int]:
            return FakeStream.current

    @staticmethod
    def device(kind: str, index: int) -> object:
        return (kind, index)

    @classmethod
    def share(cls, storage: FakeStorage) -> tuple[Any, ...]:
        """PyTorch's description of ordinary memory."""
        cls.shared.append(storage)
        return 0, b"\x02c" + bytes(64), 1, 512, b"/torch_counters", 7, b"pytorch's event", True

    @classmethod
    def ordinary_memory(cls) -> contextlib.AbstractContextManager[None]:
        cls.ordinary += 1
        return contextlib.nullcontext()


def reset(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    """Sets the stand-ins to their initial state. Files of counters are created in `files`."""
    monkeypatch.setattr(ipc, "_SHARED_MEMORY", str(files))
    monkeypatch.setattr(FakeTorch, "files", files, raising=False)
    for name, value in (("shared", []), ("capturing", set()), ("ordinary", 0), ("current", 0)):
        monkeypatch.setattr(FakeTorch, name, value)
    for name, value in (("imported", []), ("released", []), ("refuses", ""), ("counts", True)):
        monkeypatch.setattr(FakeStorage, name, value)
    monkeypatch.setattr(FakeStream, "current", (0, 0, 1))
    monkeypatch.setattr(FakeEvent, "made", [])
