"""Scenarios of queries: calls that read memory and tags and change nothing, while calls of the driver and system fail."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

from scenario import DISK, LARGE, NONE, PINNED, RELEASING, SMALL, scenario

from torch_memory_saver import _core as core

if TYPE_CHECKING:
    from step import Step
    from world import World

#: Bytes of a range, and the number of ranges of an allocation: more than one call of the driver copies.
PART, PARTS = 64, 80


def _count_step(world: World, **options: bool) -> Step:
    """Of every allocation."""
    ranges = array("Q")
    for block in sorted(world.blocks.values(), key=lambda one: one.address):
        for number in range(PARTS):
            ranges.extend((block.address + number * 4096, block.address + number * 4096 + PART))

    def run() -> None:
        counts = core.count_guard_bytes(None, None, ranges.tobytes(), **options)
        expected = [
            ctypes.string_at(begin, end - begin).count(core.GUARD_BYTE)
            for begin, end in zip(ranges[::2], ranges[1::2], strict=True)
        ]
        assert counts == expected, (counts, expected)

    step = world.other_step(run)
    if not world.pools:
        # A process reports once that memory could not be pinned, and when the checks look, the call has released it.
        step.tolerates = set(RELEASING)
    return step


def _resumed(world: World) -> None:
    world.guard(True)
    world.allocate(LARGE, NONE)
    world.allocate(SMALL, PINNED)
    world.allocate(SMALL, NONE, device=1)
    world.cycle()


@scenario("count_guard_bytes")
def _(world: World) -> Step:
    _resumed(world)
    return _count_step(world)


@scenario("count_guard_bytes_with_pooled_host_memory")
def _(world: World) -> Step:
    """Into host memory that stays."""
    world.pool()
    _resumed(world)
    return _count_step(world)


@scenario("count_guard_bytes_interruptible")
def _(world: World) -> Step:
    _resumed(world)
    return _count_step(world, interruptible=True)


@scenario("count_guard_bytes_beside_retained_backups")
def _(world: World) -> Step:
    """The backups that the allocations have keep their contents."""
    world.retain(True)
    _resumed(world)
    return _count_step(world)


@scenario("check_pause")
def _(world: World) -> Step:
    """It plans backups in host memory and in files, and makes none."""
    world.allocate(LARGE, PINNED)
    world.allocate(SMALL, DISK, device=1)
    world.allocate(SMALL, NONE)
    return world.other_step(lambda: core.check_pause(None, None))


@scenario("check_pause_beside_retained_backups")
def _(world: World) -> Step:
    """The backups that the allocations have keep their contents."""
    world.retain(True)
    world.allocate(LARGE, PINNED)
    world.allocate(SMALL, DISK)
    world.cycle()
    return world.other_step(lambda: core.check_pause(None, None))


def _read_step(world: World, **options: bool) -> Step:
    """Each paused allocation from its file."""

    def run() -> None:
        for block in world.blocks.values():
            memory = ctypes.create_string_buffer(block.size)
            assert core.read_backup(block.address, block.size, ctypes.addressof(memory), None, **options)
            assert memory.raw == block.data

    return world.other_step(run)


@scenario("read_backup")
def _(world: World) -> Step:
    world.allocate(LARGE, DISK)
    world.allocate(SMALL, DISK, device=1)
    world.pause(None)
    return _read_step(world)


@scenario("read_backup_interruptible")
def _(world: World) -> Step:
    world.allocate(LARGE, DISK)
    world.pause(None)
    return _read_step(world, interruptible=True)


@scenario("list_tags")
def _(world: World) -> Step:
    world.allocate(SMALL, NONE)
    world.make_tags()

    def run() -> None:
        known = core.tags()
        assert [known[block.tag] for block in world.blocks.values()] == [True]

    return world.other_step(run)
