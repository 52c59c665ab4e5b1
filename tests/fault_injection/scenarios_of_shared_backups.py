"""Scenarios of shared backups, which run while calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machine import OUT_OF_MEMORY
from scenario import LARGE, NONE, RELEASING, SHARED, SMALL, scenario

if TYPE_CHECKING:
    from blocks import Block
    from step import Step
    from world import World

#: Smaller than an object.
PRIVATE = 100_003
#: A folder that cannot be looked at is opened again. A refused registration is logged once a process.
UNNOTICED = {"lstat", *RELEASING}


def _allocate(world: World) -> None:
    world.allocate(SMALL, SHARED)
    world.allocate(LARGE, SHARED)
    world.allocate(PRIVATE, SHARED)


def _pause(world: World) -> Step:
    step = world.pause_step(("a",))
    step.tolerates |= UNNOTICED
    step.causes.add(("linkat", 0))  # a file that cannot be looked at counts as removed
    return step


def _resume(world: World) -> Step:
    """A device that cannot be waited for may still read what it checks, which is then damaged."""
    step = world.checked_resume_step(("a",))
    step.tolerates |= UNNOTICED
    return step


@scenario("pause_with_shared_backup")
def _(world: World) -> Step:
    """An object and a private tail."""
    world.allocate(SMALL, SHARED)
    return _pause(world)


@scenario("pause_with_shared_backups")
def _(world: World) -> Step:
    _allocate(world)
    world.allocate(SMALL, SHARED, "other")
    return _pause(world)


@scenario("pause_first_in_process_with_shared_backup", fresh=True)
def _(world: World) -> Step:
    """The folder, its key and the holder are made."""
    world.use_device(0)
    world.allocate(SMALL, SHARED)
    return _pause(world)


@scenario("pause_with_shared_backup_of_what_has_changed")
def _(world: World) -> Step:
    """One object has changed, and the others are kept."""
    _allocate(world)
    world.pause(None)
    world.machine.settle()
    world.resume(None)
    world.machine.settle()
    world.change(next(block for block in world.blocks.values() if block.size == LARGE))
    return _pause(world)


@scenario("pause_linking_shared_objects")
def _(world: World) -> Step:
    """The objects exist, and this process has no link to them."""
    _allocate(world)
    world.pause(None)
    world.publish_objects()
    contents = [(block.size, block.data, block.tag) for block in world.blocks.values()]
    for block in list(world.blocks.values()):
        world.free(block)
    world.machine.settle()
    for size, data, tag in contents:
        world.allocate(size, SHARED, tag).write(data)
    step = _pause(world)
    step.keeps = True  # the objects exist already
    step.finish = world.withdraw_objects
    return step


@scenario("resume_with_shared_backup")
def _(world: World) -> Step:
    """From registered objects."""
    _allocate(world)
    world.pause(None)
    world.machine.settle()
    return _resume(world)


@scenario("resume_with_shared_backup_through_pinned_memory")
def _(world: World) -> Step:
    """From objects that are not registered."""
    _allocate(world)
    world.machine.refuse("cuMemHostRegister")
    world.pause(None)
    world.machine.settle()
    world.machine.disarm()
    return _resume(world)


@scenario("free_paused_with_shared_backup")
def _(world: World) -> Step:
    blocks = [world.allocate(SMALL, SHARED), world.allocate(LARGE, SHARED)]
    world.pause(None)
    world.machine.settle()
    return world.free_step(blocks)


def _by_fingerprint(step: Step) -> Step:
    """The call fails without fingerprints, and the log says why there are none."""
    step.tolerates |= UNNOTICED
    step.causes.add(("", 0))
    step.causes.add(("linkat", 0))  # a file that cannot be looked at counts as removed
    return step


def _publishable(world: World) -> list[Block]:
    world.pools = True  # the buffers of the ring, and of fingerprints
    return [world.allocate(SMALL, NONE, "b"), world.allocate(LARGE, NONE, "b")]


@scenario("publish")
def _(world: World) -> Step:
    return _by_fingerprint(world.publish_step(_publishable(world)))


@scenario("publish_in_place_of_another")
def _(world: World) -> Step:
    """The name exists, with one of the objects. After a failure it is what it was."""
    one, other = _publishable(world)
    world.publish_step([one]).run()
    former = world.published("model")
    step = world.publish_step([one, other])

    def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
        world.sweep_publications()
        found = world.published("model") or []
        problems = [] if world.states() == before else ["allocations changed"]
        if (found == former) != (error is not None) or found[:1] != former:
            problems.append(f"published, with {error}: {found}, before {former}")
        return problems

    step.verify = verify
    return _by_fingerprint(step)


def _adopt(world: World, blocks: list[Block]) -> Step:
    step = _by_fingerprint(world.adopt_step(blocks))
    step.tolerates.add("pread")  # the mapping of the object has the bytes as well
    return step


@scenario("adopt")
def _(world: World) -> Step:
    """The objects are mapped, and copied through pinned memory."""
    return _adopt(world, _publishable(world))


@scenario("adopt_on_two_devices")
def _(world: World) -> Step:
    return _adopt(world, [*_publishable(world), world.allocate(SMALL, NONE, "b", 1)])


@scenario("adopt_with_little_device_memory")
def _(world: World) -> Step:
    """The scratch memory holds one object at a time."""
    step = _adopt(world, [world.allocate(LARGE, NONE, "b") for _ in range(2)])
    world.fill_device(0, but=2)
    step.causes.add(("cuMemAlloc", OUT_OF_MEMORY))
    step.waits_for.add(OUT_OF_MEMORY)
    return step


@scenario("adopt_what_a_paused_allocation_keeps")
def _(world: World) -> Step:
    """The objects are registered, and the driver copies them."""
    world.machine.settle()
    block, source = world.allocate(SMALL, NONE, "b"), world.allocate(SMALL, SHARED, "a")
    source.write(block.data)
    step = _adopt(world, [block])
    world.pause(("a",))
    world.machine.settle()
    return step
