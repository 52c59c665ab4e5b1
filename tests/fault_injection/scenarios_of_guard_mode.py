"""Scenarios of guard mode, where paused addresses show a pattern, which run while calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scenario import LARGE, NONE, PINNED, SMALL, scenario

if TYPE_CHECKING:
    from step import Step
    from world import World


def _guarded(world: World) -> None:
    """With nothing, everything and a part in a backup, on two devices."""
    world.guard(True)
    world.allocate(LARGE, NONE)
    world.thin(world.allocate(LARGE, PINNED), (4096, 9000))
    world.allocate(SMALL, NONE, device=1)
    world.allocate(SMALL, PINNED, "other")


@scenario("pause_in_guard_mode")
def _(world: World) -> Step:
    _guarded(world)
    return world.pause_step(live=True)


@scenario("pause_in_guard_mode_after_another_tag")
def _(world: World) -> Step:
    """With the page of an earlier pause."""
    _guarded(world)
    world.pause(("other",))
    return world.pause_step()


@scenario("resume_in_guard_mode")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None, live=True)
    return world.resume_step()


@scenario("resume_two_of_three_tags_in_guard_mode")
def _(world: World) -> Step:
    """The pages stay for the rest."""
    _guarded(world)
    world.allocate(SMALL, NONE, "rest")
    world.pause(None)
    return world.resume_step(("a", "other"), interruptible=True)


@scenario("resume_in_background_in_guard_mode")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None)
    return world.pending_step(stream=True)


@scenario("free_paused_in_guard_mode")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None)
    return world.free_step(list(world.blocks.values()))
