"""Guards reading a backup on disk into host memory while its allocation stays paused."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver import _core, errors

MIB = 1 << 20
BLOCK = 512 << 10
#: Neither a multiple of the block of a checksum nor of what one read fills, and more than both.
SIZE = 9 * MIB + 12_345


def pattern(size: int) -> bytes:
    return bytes((index * 7 + (index >> 8)) & 0xFF for index in range(size))


CONTENT = pattern(64 << 10) * (SIZE // (64 << 10)) + pattern(SIZE % (64 << 10))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    _core.set_disk_directory(str(tmp_path))
    return tmp_path


@pytest.fixture
def address(simulator: Any, directory: Path) -> Iterator[int]:
    """An allocation with its contents, paused to a file."""
    level = _core.region_enter(tag="disk", backup=_core.BACKUP_DISK, managed=True)
    address = _core.allocate(SIZE, 0)
    _core.region_leave(level)
    simulator.write(address, CONTENT)
    _core.pause(None, None)
    yield address
    if _core.find(address) is not None:
        _core.free(address)


def read(address: int, size: int) -> bytes | None:
    memory = ctypes.create_string_buffer(size)
    found = _core.read_backup(address, size, ctypes.addressof(memory), None)
    return memory.raw if found else None


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, SIZE), (0, 1), (SIZE - 1, 1), (BLOCK - 3, 6), (BLOCK, BLOCK), (8 * BLOCK - 1, 2), (12_345, 8 * MIB), (SIZE, 0)],
)
def test_any_range_is_read(address: int, simulator: Any, offset: int, size: int) -> None:
    assert read(address + offset, size) == CONTENT[offset : offset + size]
    row = _core.find(address)
    assert row is not None
    assert row.state == _core.STATE_PAUSED
    assert simulator.usage(0).physical_bytes == 0, "nothing was mapped for it"


def test_the_backup_stays_and_is_restored(address: int, simulator: Any) -> None:
    before = _core.tag_info("disk")
    assert read(address, SIZE) == CONTENT
    assert _core.tag_info("disk") == before, "it is no pause and no resume"
    _core.resume(None, 0)
    assert simulator.read(address, SIZE) == CONTENT
    assert read(address, SIZE) is None, "resident memory has no backup"


def test_only_what_the_pause_has_kept(simulator: Any, directory: Path) -> None:
    address = _core.allocate(4 * MIB, 0)
    simulator.write(address, CONTENT[: 4 * MIB])
    live = [(0, 1000), (MIB, 3 * MIB - 512)]
    ends = array("Q", [address + end for pair in live for end in pair])
    answer = (array("Q", [address]).tobytes(), ends.tobytes())
    _core.pause(None, None, backup=_core.BACKUP_DISK, find_live=lambda: answer)
    for begin, end in live:
        assert read(address + begin, end - begin) == CONTENT[begin:end]
        assert read(address + begin + 10, 20) == CONTENT[begin + 10 : begin + 30]
    for begin, end in ((0, 1001), (500, 1500), (2000, 3000), (MIB - 1, MIB + 1), (3 * MIB - 600, 3 * MIB)):
        assert read(address + begin, end - begin) is None


@pytest.mark.parametrize("backup", ["none", "pinned"])
def test_other_backups_are_not_read(simulator: Any, backup: str) -> None:
    address = _core.allocate(MIB, 0)
    _core.pause(None, None, backup=_core.BACKUP_KINDS[backup])
    assert read(address, MIB) is None


def test_other_allocations_stay_as_they_are(address: int, simulator: Any) -> None:
    other = _core.allocate(MIB, 0)
    _core.pause(None, None)
    before = [(row.address, row.state) for row in _core.segments()]
    assert read(address, 10) == CONTENT[:10]
    assert [(row.address, row.state) for row in _core.segments()] == before
    assert read(other, 10) is None


def test_a_range_beyond_the_allocation_and_an_unmanaged_address(address: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="beyond its allocation"):
        read(address + 1, SIZE)
    assert read(0xDEAD000, 1) is None
    row = _core.find(address)
    assert row is not None
    assert row.state == _core.STATE_PAUSED


def test_a_changed_file_is_an_error(address: int, directory: Path) -> None:
    (file,) = directory.glob("*.backup")
    with file.open("r+b") as opened:
        opened.seek(BLOCK + 1000)
        opened.write(b"changed")
    with pytest.raises(errors.BackupIOError, match="was changed or truncated"):
        read(address, SIZE)
    assert read(address, BLOCK) == CONTENT[:BLOCK], "other blocks are as they were"
    file.unlink()
    with pytest.raises(errors.BackupIOError):
        read(address, 10)


def test_a_free_during_the_call_is_carried_out_at_its_end(address: int, directory: Path) -> None:
    """Threads read while another frees: each read finds all contents or nothing."""
    results: list[bytes] = []

    def work() -> None:
        while (found := read(address, 4 * MIB)) is not None:
            results.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    _core.free(address)
    for thread in threads:
        thread.join()
    assert set(results) <= {CONTENT[: 4 * MIB]}
    assert list(directory.glob("*.backup")) == []
