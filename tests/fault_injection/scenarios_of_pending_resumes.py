"""Scenarios of resumes in the background, which run while calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scenario import DISK, LARGE, MMAP, NONE, PINNED, RETAIN, SMALL, scenario

if TYPE_CHECKING:
    from step import Step
    from world import World


def _to_restore(world: World, *kinds: int) -> None:
    for number, kind in enumerate(kinds):
        world.allocate(SMALL, kind, device=number % 2)
    world.allocate(LARGE, PINNED)
    world.pause(None)


@scenario("resume_in_background")
def _(world: World) -> Step:
    _to_restore(world, NONE, MMAP, DISK)
    return world.pending_step()


@scenario("resume_in_background_writing_zeros")
def _(world: World) -> Step:
    _to_restore(world, NONE)
    return world.pending_step(zero=True, host_memory=RETAIN)


@scenario("resume_in_background_with_waiting_stream")
def _(world: World) -> Step:
    _to_restore(world)
    return world.pending_step(stream=True)


@scenario("resume_in_background_on_two_devices_with_waiting_stream")
def _(world: World) -> Step:
    _to_restore(world, NONE, PINNED, MMAP, MMAP)
    return world.pending_step(stream=True)


@scenario("resume_in_background_with_nothing_to_copy")
def _(world: World) -> Step:
    """There is nothing to copy."""
    world.allocate(SMALL, NONE)
    world.pause(None)
    return world.pending_step(stream=True)


@scenario("resume_in_background_without_waiter")
def _(world: World) -> Step:
    _to_restore(world, NONE, DISK)
    return world.dropped_step()
