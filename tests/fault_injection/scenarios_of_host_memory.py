"""Scenarios of pooled, retained, reserved and released host memory, which run while calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scenario import LARGE, MMAP, PINNED, RELEASE, RETAIN, SMALL, scenario

if TYPE_CHECKING:
    from step import Step
    from world import World


# ---- what becomes of host memory ----


def _pooled(world: World) -> None:
    world.pool()
    world.allocate(SMALL, PINNED)
    world.allocate(LARGE, PINNED)
    world.allocate(SMALL, MMAP, "b")


@scenario("pause_to_empty_pool")
def _(world: World) -> Step:
    _pooled(world)
    return world.pause_step()


@scenario("pause_to_filled_pool")
def _(world: World) -> Step:
    _pooled(world)
    world.cycle()
    world.rewrite()
    return world.pause_step()


@scenario("pause_to_pool_that_is_too_small")
def _(world: World) -> Step:
    """Some of it is in the pool."""
    _pooled(world)
    world.cycle()
    world.rewrite()
    world.allocate(LARGE, PINNED)
    return world.pause_step()


@scenario("resume_keeping_host_memory_in_pool")
def _(world: World) -> Step:
    _pooled(world)
    world.pause(None)
    return world.resume_step()


@scenario("resume_releasing_pooled_host_memory")
def _(world: World) -> Step:
    _pooled(world)
    world.cycle()
    world.pause(None)
    return world.resume_step(host_policy=RELEASE)


@scenario("resume_retaining_host_memory")
def _(world: World) -> Step:
    world.allocate(SMALL, PINNED)
    world.allocate(LARGE, MMAP)
    world.pause(None)
    return world.resume_step(host_policy=RETAIN)


@scenario("reserve_host_memory")
def _(world: World) -> Step:
    return world.reserve_step(LARGE)


@scenario("reserve_more_host_memory")
def _(world: World) -> Step:
    _pooled(world)
    world.cycle()
    return world.reserve_step(4 * LARGE)


@scenario("pause_to_reserved_host_memory")
def _(world: World) -> Step:
    world.allocate(LARGE, PINNED)
    world.reserve(2 * LARGE)
    return world.pause_step()


@scenario("release_backup_views_after_resume")
def _(world: World) -> Step:
    """Views of backups that the resume had to keep: the memory is released with them."""
    blocks = [world.allocate(SMALL, PINNED), world.allocate(SMALL, MMAP)]
    world.pause(None)
    views = [world.view(block) for block in blocks]
    world.resume(None)
    return world.free_step([], views.clear)
