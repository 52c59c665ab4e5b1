"""Guards the bytes that describe shared memory to PyTorch in other processes."""

from __future__ import annotations

import os
import struct

import pytest

from torch_memory_saver import _core
from torch_memory_saver._torch import ipc
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

MIB = 1 << 20


def export(generation: int) -> _core.Export:
    return _core.Export((0x7000000000, 64 * MIB, generation, 0, 4096))  # type: ignore[call-arg,arg-type]


EXPORT = export(5)


def test_a_description_has_the_importers_layout() -> None:
    old, new = (ipc.describe(layout, EXPORT) for layout in (1, 3))
    assert old[:2] == b"\x01e" and new[:2] == b"\x03e"
    assert struct.unpack_from("<iIQQi", old, 2) == (os.getpid(), 0, 64 * MIB, 1, 4096)
    assert struct.unpack_from("<iIQQiIi", new, 2) == (os.getpid(), 0, 64 * MIB, 1, 1, 0, 4096)
    assert old[30:] == new[38:], "the nonce"


def test_a_description_is_unique_to_its_memory() -> None:
    assert ipc.describe(1, EXPORT) == ipc.describe(1, EXPORT)
    assert ipc.describe(1, EXPORT) != ipc.describe(1, export(6)), "under the same descriptor"


@pytest.mark.parametrize(
    ("release", "layout"),
    [("2.6", 1), ("2.6.0+cu124", 1), ("2.12.1", 1), ("2.13", 3), ("2.15.0a0+git1", 3), ("3.0", 3)],
)
def test_the_layout_of_a_release(release: str, layout: int) -> None:
    assert ipc.format_of_importer(release) == layout
    assert ipc.check_importer(release) == release


@pytest.mark.parametrize("release", ["2.5", "1.13", "", "2", "new", 2.11, (2, 11)])
def test_a_release_that_cannot_import_is_refused(release: object) -> None:
    with pytest.raises(InvalidArgumentError, match="share_for"):
        ipc.check_importer(release)


def test_the_format_of_this_pytorch_is_read_from_its_own_description() -> None:
    assert [ipc.format_of_own_description(bytes([version]) + b"c") for version in (1, 2, 3)] == [1, 1, 3]
    with pytest.raises(InvalidStateError, match=r"by version 4 of its format.*Update torch_memory_saver"):
        ipc.format_of_own_description(b"\x04c")
