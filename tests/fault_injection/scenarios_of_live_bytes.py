"""Scenarios of pauses that keep a part of the contents, and of resumes that write zeros, which run while calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scenario import DISK, LARGE, MMAP, NONE, PINNED, RELEASING, SMALL, scenario

if TYPE_CHECKING:
    from step import Step
    from world import World


def _thinned(world: World) -> None:
    """Several ranges, the end of one, nothing at all, and everything; in host memory and in files."""
    world.thin(world.allocate(LARGE, PINNED), (0, 4096), (4096, 9000), (100_001, 2_000_001), (LARGE - 5, LARGE))
    world.thin(world.allocate(SMALL, MMAP), (SMALL - 70_000, SMALL))
    world.thin(world.allocate(SMALL, PINNED))
    world.thin(world.allocate(SMALL, MMAP), (0, SMALL))
    world.thin(world.allocate(LARGE, DISK), (1, 2), (4096, 1_500_000), (LARGE - 5, LARGE))
    world.thin(world.allocate(SMALL, DISK))
    world.allocate(SMALL, PINNED)


@scenario("pause_saving_live_bytes")
def _(world: World) -> Step:
    _thinned(world)
    return world.pause_step(live=True)


@scenario("resume_live_bytes")
def _(world: World) -> Step:
    _thinned(world)
    world.pause(None, live=True)
    return world.resume_step()


@scenario("resume_live_bytes_writing_zeros")
def _(world: World) -> Step:
    _thinned(world)
    world.pause(None, live=True)
    return world.resume_step(zero=True)


def _preserved(world: World) -> None:
    """Parts of blocks without a backup, beside one of which nothing is kept, and beside one that has a backup."""
    world.thin(world.allocate(LARGE, NONE), (512, 4608), (100_001, 2_000_001), (LARGE - 5, LARGE))
    world.thin(world.allocate(SMALL, NONE), (0, SMALL))
    world.allocate(SMALL, NONE)
    world.thin(world.allocate(SMALL, PINNED), (0, 4096))


@scenario("pause_preserving_live_bytes")
def _(world: World) -> Step:
    _preserved(world)
    return world.pause_step(live=True, preserves=True)


@scenario("resume_preserved_bytes")
def _(world: World) -> Step:
    _preserved(world)
    world.pause(None, live=True, preserves=True)
    return world.resume_step()


@scenario("pause_saving_live_bytes_to_retained_backup")
def _(world: World) -> Step:
    """Into memory that holds all of an earlier pause."""
    world.retain(True)
    block = world.allocate(LARGE, PINNED)
    world.cycle()
    world.rewrite()
    world.thin(block, (70_000, 80_000), (2_000_000, LARGE))
    step = world.pause_step(live=True)
    step.tolerates = set(RELEASING)
    return step


@scenario("resume_writing_zeros")
def _(world: World) -> Step:
    world.allocate(SMALL, NONE)
    world.allocate(LARGE, NONE, device=1)
    world.allocate(SMALL, PINNED)
    world.pause(None)
    return world.resume_step(zero=True)
