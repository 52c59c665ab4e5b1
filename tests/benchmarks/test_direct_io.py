"""Guards the limit of disk backups: plain direct I/O, in the fastest of several ways."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import direct_io
import pytest

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[direct_io.DirectFile]:
    made = direct_io.DirectFile(str(tmp_path), 20 * MIB)
    yield made
    made.close()


def test_direct_io(file: direct_io.DirectFile, tmp_path: Path) -> None:
    assert file.bytes == 32 * MIB
    file.choose_ways()
    assert file.write() >= 0
    assert file.read() >= 0
    assert os.fstat(file._descriptor).st_size == 32 * MIB
    with open(f"/proc/self/fd/{file._descriptor}", "rb") as written:
        content = written.read()
    assert len(content) == 32 * MIB
    assert all(content[start : start + 4096] != bytes(4096) for start in range(0, 32 * MIB, MIB))
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    written, read = file.name.removeprefix("direct I/O, writes ").split(", reads ")
    assert {written, read} <= {str(way) for way in direct_io._WAYS}


def test_a_way_is_reported_in_suitable_units() -> None:
    assert str(direct_io._Way(4, 16 * MIB)) == "4 x 16 MiB"
    assert str(direct_io._Way(16, MIB // 2)) == "16 x 512 KiB"


def test_a_way_that_was_fast_once_is_not_the_fastest(file: direct_io.DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    lucky, steady = direct_io._WAYS[1], direct_io._WAYS[3]
    lucky_times = itertools.cycle((1.0, 1.0, 9.0, 9.0, 9.0, 9.0))  # a write and a read each time

    def transfer(operation: object, way: direct_io._Way, size: int) -> float:
        return next(lucky_times) if way == lucky else 2.0 if way == steady else 3.0

    monkeypatch.setattr(file, "_transfer", transfer)
    file.choose_ways()
    assert file._ways == {"write": steady, "read": steady}


def test_direct_io_that_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(direct_io.os, "O_DIRECT", 1 << 30)

    real = os.open

    def opens(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & (1 << 30):
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(direct_io.os, "open", opens)
    file = direct_io.DirectFile(str(tmp_path), 20 * MIB)
    assert file.write() >= 0
    assert file.direct is False
    assert file.name.startswith("direct I/O is refused")
    file.close()
