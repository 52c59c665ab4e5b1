"""Scenarios of runs: several allocations on one handle, the slack that frees leave there, and its ways back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from machine import OUT_OF_MEMORY
from scenario import DISK, NONE, PINNED, RELEASING, SMALL, scenario

if TYPE_CHECKING:
    from blocks import Block
    from step import Step
    from world import World

#: Allocations of a run.
SEGMENTS = 4


def _run_with_slack(world: World, kind: int) -> list[Block]:
    """The last part is in use, and one before it is not."""
    blocks = world.run(SEGMENTS, kind)
    world.free(blocks.pop(1))
    return blocks


# ---- resume ----


def _resume(kind: int) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        world.run(SEGMENTS, kind)
        world.pause(None)
        return world.resume_step()

    return prepare


scenario("resume_run_without_backup")(_resume(NONE))
scenario("resume_run_with_pinned_backup")(_resume(PINNED))
scenario("resume_run_with_disk_backup")(_resume(DISK))


@scenario("resume_runs_on_two_devices")
def _(world: World) -> Step:
    for device in (0, 1):
        world.run(SEGMENTS, PINNED, "ab"[device], device)
    world.pause(None)
    return world.resume_step()


@scenario("resume_run_with_too_little_device_memory")
def _(world: World) -> Step:
    """There is room for a part of it. Handles of each size are tried, and all of them are given back."""
    world.run(SEGMENTS, PINNED)
    world.pause(None)
    world.fill_device(0, but=SEGMENTS - 1)
    step = world.resume_step()
    step.causes.add(("cuMemCreate", OUT_OF_MEMORY))

    def retry() -> None:
        world.empty_device(0)
        world.resume(None)

    step.retry = retry
    return step


@scenario("resume_run_in_background_with_waiting_stream")
def _(world: World) -> Step:
    world.run(SEGMENTS, PINNED)
    world.pause(None)
    return world.pending_step(stream=True)


# ---- pause ----


def _pause(kind: int, slack: bool) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        _run_with_slack(world, kind) if slack else world.run(SEGMENTS, kind)
        return world.pause_step()

    return prepare


scenario("pause_run_without_backup")(_pause(NONE, slack=False))
scenario("pause_run_with_pinned_backup")(_pause(PINNED, slack=False))
scenario("pause_run_with_slack")(_pause(PINNED, slack=True))


# ---- frees and their slack ----


@scenario("free_part_of_run")
def _(world: World) -> Step:
    return world.free_step(world.run(SEGMENTS, NONE)[1:3])


@scenario("free_all_of_run")
def _(world: World) -> Step:
    return world.free_step(world.run(SEGMENTS, PINNED))


@scenario("free_last_of_run")
def _(world: World) -> Step:
    blocks = world.run(SEGMENTS, NONE)
    for block in blocks[1:]:
        world.free(block)
    return world.free_step(blocks[:1])


@scenario("allocate_from_slack")
def _(world: World) -> Step:
    """A part of what two frees have left. The driver is not called."""
    blocks = world.run(SEGMENTS, NONE)
    for block in blocks[1:3]:
        world.free(block)
    step = world.allocate_step(lambda: world.allocate(SMALL, NONE))
    # Without host memory for its piece, memory of its own is asked for; without addresses for a large range, a small one.
    step.tolerates = {"calloc", "cuMemAddressReserve"}
    return step


@scenario("allocate_out_of_memory_beside_slack")
def _(world: World) -> Step:
    """Another tag finds no memory: the message names the slack."""
    _run_with_slack(world, NONE)
    world.fill_device(0)
    step = world.allocate_step(lambda: world.allocate(SMALL, NONE, "b"), out_of_memory=True)

    def retry() -> None:
        world.pause(None, backup=PINNED)
        world.resume(None)
        world.allocate(SMALL, NONE, "b")

    step.retry = retry
    return step


@scenario("free_part_of_run_while_pausing")
def _(world: World) -> Step:
    block = world.run(SEGMENTS, PINNED)[1]
    step = world.free_in_transition(block, world.pause, lambda: world.hold(block))
    # Memory that could not be pinned, which a process reports once, was released with the block.
    step.tolerates = set(RELEASING)
    return step


@scenario("free_part_of_run_while_resuming")
def _(world: World) -> Step:
    block = world.run(SEGMENTS, PINNED)[1]
    world.pause(None)
    # Memory that copies may still go to is damaged. What was freed is slack then, so nothing is unmapped at the end.
    damaging = {"cuMemUnmap", "cuMemRelease", "cuStreamSynchronize"}
    return world.free_in_transition(block, world.resume, world.hold_copies, damaging)


@scenario("end_capture_with_deferred_frees_in_runs")
def _(world: World) -> Step:
    """The frees that a capture deferred: of a part of a run, and of all of another."""
    blocks = world.run(SEGMENTS, NONE)[1:3] + world.run(SEGMENTS, NONE, "b")
    world.capture_begin()
    for block in blocks:
        world.free(block)
    return world.free_step([], world.capture_end)


# ---- damage ----


@scenario("resume_damaged_run")
def _(world: World) -> Step:
    world.damage(world.run(SEGMENTS, PINNED)[0])
    return world.repairing(world.resume_step())


@scenario("pause_with_damaged_run")
def _(world: World) -> Step:
    world.damage(world.run(SEGMENTS, PINNED)[0])
    world.run(SEGMENTS, PINNED, "b")
    return world.repairing(world.pause_step())


@scenario("free_part_of_damaged_run")
def _(world: World) -> Step:
    blocks = world.run(SEGMENTS, PINNED)
    world.damage(blocks[0])
    return world.free_step(blocks[1:])


# ---- exports ----


@scenario("export_memory_of_run")
def _(world: World) -> Step:
    block = world.run(SEGMENTS, NONE)[1]
    step = world.other_step(lambda: world.export(block))
    # The simulated driver moves exported memory to a file of its own, which stays for as long as the memory.
    step.keeps = True
    return step


@scenario("pause_exported_run")
def _(world: World) -> Step:
    world.export(world.run(SEGMENTS, PINNED)[1])
    return world.pause_step()


@scenario("resume_exported_run")
def _(world: World) -> Step:
    """Memory of a kind that was exported gets a handle for each allocation."""
    world.export(world.run(SEGMENTS, PINNED)[1])
    world.pause(None)
    return world.resume_step()


@scenario("free_part_of_exported_run")
def _(world: World) -> Step:
    blocks = world.run(SEGMENTS, NONE)
    world.export(blocks[1])
    return world.free_step(blocks[1:])
