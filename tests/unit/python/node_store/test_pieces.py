"""Guards how storages are cut into objects: every byte belongs to one, and each has a size that the core accepts."""

from __future__ import annotations

import random

import pytest

from torch_memory_saver.node_store.pieces import MAX_BYTES, MIN_BYTES, Piece, plan
from torch_memory_saver.node_store.tensors import StorageShape

MIB = 1 << 20


def test_large_storages_are_cut_as_a_pause_cuts_blocks() -> None:
    made = plan([StorageShape(2 * MAX_BYTES + MIB + 24, True, 0)])
    assert made.pieces == [
        Piece(0, 0, MAX_BYTES),
        Piece(0, MAX_BYTES, MAX_BYTES),
        Piece(0, 2 * MAX_BYTES, MIB + 16),
    ]
    (pack,) = made.packs
    assert pack.pieces == [Piece(0, 2 * MAX_BYTES + MIB + 16, 8)]
    assert pack.bytes == MIN_BYTES


def test_small_and_unaligned_storages_are_packed_for_each_device() -> None:
    shapes = [StorageShape(1000, True, 0), StorageShape(3 * MIB + 1, False, 1), StorageShape(MIN_BYTES - 1, True, 0)]
    made = plan(shapes)
    assert made.pieces == []
    assert [(pack.device, pack.pieces) for pack in made.packs] == [
        (0, [Piece(0, 0, 1000), Piece(2, 0, MIN_BYTES - 1)]),
        (1, [Piece(1, 0, 3 * MIB + 1)]),
    ]
    assert made.packs[0].bytes == MIN_BYTES + 1008 and made.packs[1].bytes == 3 * MIB + 16


def test_empty_storages_have_no_objects() -> None:
    made = plan([StorageShape(0, True, 0)])
    assert made.pieces == [] and made.packs == []


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_belongs_to_one_object(seed: int) -> None:
    choose = random.Random(seed)
    sizes = (0, 1, 15, 16, 1000, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 7 * MIB + 3, MAX_BYTES, MAX_BYTES + 9)
    shapes = [
        StorageShape(choose.choice(sizes) + choose.randrange(3), choose.random() < 0.8, choose.randrange(3))
        for _ in range(60)
    ]
    made = plan(shapes)
    covered = [0] * len(shapes)
    for piece in sorted(
        [*made.pieces, *(piece for pack in made.packs for piece in pack.pieces)],
        key=lambda each: (each.storage, each.offset),
    ):
        assert piece.offset == covered[piece.storage] and piece.bytes > 0
        covered[piece.storage] += piece.bytes
    assert covered == [shape.bytes for shape in shapes]
    for size in [piece.bytes for piece in made.pieces] + [pack.bytes for pack in made.packs]:
        assert MIN_BYTES <= size <= MAX_BYTES and size % 16 == 0
    for piece in made.pieces:
        assert shapes[piece.storage].aligned and piece.offset % 16 == 0
    for pack in made.packs:
        assert {shapes[piece.storage].device for piece in pack.pieces} == {pack.device}
        assert sum(piece.bytes for piece in pack.pieces) == pack.used <= pack.bytes
