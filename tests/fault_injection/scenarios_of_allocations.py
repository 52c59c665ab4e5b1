"""Scenarios of allocations, frees, captures, and the directory of backup files, which run while calls fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scenario import DISK, KINDS, LARGE, MMAP, NONE, PINNED, RELEASING, SMALL, scenario

if TYPE_CHECKING:
    from blocks import Block
    from step import Step
    from world import World


# ---- allocations ----


@scenario("allocate")
def _(world: World) -> Step:
    return world.allocate_step(lambda: world.allocate(LARGE, PINNED))


@scenario("allocate_on_other_device")
def _(world: World) -> Step:
    return world.allocate_step(lambda: world.allocate(SMALL, NONE, device=1))


@scenario("allocate_with_memory_margin")
def _(world: World) -> Step:
    world.margin(1 << 20)
    return world.allocate_step(lambda: world.allocate(SMALL, NONE))


@scenario("allocate_after_reclaiming_refused_memory")
def _(world: World) -> Step:
    """Out of memory at first; memory that the driver had failed to release makes room."""
    block = world.allocate(LARGE, NONE)
    world.allocate(SMALL, PINNED)
    world.free_refused(block)
    world.fill_device(0)
    step = world.allocate_step(lambda: world.allocate(SMALL, NONE), out_of_memory=True)
    # Without addresses for a large range, a small one is reserved.
    step.tolerates = {"cuMemAddressReserve"}
    return step


@scenario("allocate_first_in_process", fresh=True)
def _(world: World) -> Step:
    """Loads the driver, queries its devices, and creates everything that is created once."""
    step = world.allocate_step(lambda: world.allocate(SMALL, PINNED))
    # The library examines the driver's file before dlopen, which examines it again and reports the error.
    # The shared page does not name a device whose UUID is unknown.
    step.tolerates = {"stat", "open", "pread", "cuDeviceGetUuid"}
    return step


@scenario("pause_first_in_process", fresh=True)
def _(world: World) -> Step:
    world.use_device(0)
    world.allocate(SMALL, DISK)
    world.allocate(SMALL, PINNED)
    return world.pause_step()


@scenario("allocate_with_new_tag", fresh=True)
def _(world: World) -> Step:
    world.use_device(0)
    world.allocate(SMALL, NONE)
    return world.allocate_step(lambda: world.allocate(SMALL, NONE, "never seen"))


@scenario("enter_regions_of_many_new_tags", fresh=True)
def _(world: World) -> Step:
    """So many that their table grows; a test cannot see which of them exist."""
    world.use_device(0)
    world.allocate(SMALL, NONE)
    return world.other_step(world.make_tags)


@scenario("refresh_peers_for_device_used_later", fresh=True)
def _(world: World) -> Step:
    """A device that comes into use after something was allocated on another."""
    world.use_device(0)
    world.allocate(SMALL, NONE)
    world.allocate(LARGE, NONE)
    world.use_device(1)
    return world.other_step(world.refresh_peers)


# ---- exports ----


def _export_step(world: World, block: Block) -> Step:
    step = world.other_step(lambda: world.export(block))
    # The simulated driver moves exported memory to a file of its own, which stays for as long as the memory.
    step.keeps = True
    return step


@scenario("export_memory")
def _(world: World) -> Step:
    return _export_step(world, world.allocate(SMALL, PINNED))


@scenario("export_memory_again_after_resume")
def _(world: World) -> Step:
    """After a pause and a resume, which closed the first descriptor."""
    block = world.allocate(SMALL, PINNED)
    world.export(block)
    world.cycle()
    return _export_step(world, block)


@scenario("pause_exported_memory")
def _(world: World) -> Step:
    world.export(world.allocate(SMALL, PINNED))
    world.export(world.allocate(LARGE, NONE))
    return world.pause_step()


@scenario("free_exported_memory")
def _(world: World) -> Step:
    block = world.allocate(SMALL, NONE)
    world.export(block)
    return world.free_step([block])


@scenario("pause_with_nothing_allocated", fresh=True)
def _(world: World) -> Step:
    """Nothing was ever allocated."""
    return world.pause_step()


# ---- frees ----


def _free(kind: int) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        return world.free_step([world.allocate(SMALL, kind), world.allocate(LARGE, kind)])

    return prepare


def _free_paused(kind: int) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        blocks = [world.allocate(SMALL, kind), world.allocate(LARGE, kind)]
        world.allocate(SMALL, kind)
        world.pause(None)
        return world.free_step(blocks)

    return prepare


scenario("free_active")(_free(NONE))
for _name, _kind in KINDS.items():
    scenario(f"free_paused_{_name}")(_free_paused(_kind))


@scenario("free_active_with_backup_file")
def _(world: World) -> Step:
    """The file of an allocation that was paused once is kept until it is freed."""
    blocks = [world.allocate(SMALL, DISK), world.allocate(SMALL, DISK)]
    world.cycle()
    return world.free_step(blocks)


@scenario("free_active_with_retained_backups")
def _(world: World) -> Step:
    world.retain(True)
    blocks = [world.allocate(SMALL, PINNED), world.allocate(SMALL, MMAP)]
    world.cycle()
    return world.free_step(blocks)


@scenario("free_damaged")
def _(world: World) -> Step:
    block = world.allocate(SMALL, PINNED)
    world.damage(block)
    return world.free_step([block])


@scenario("free_on_two_devices")
def _(world: World) -> Step:
    return world.free_step([world.allocate(SMALL, NONE, device=device) for device in (1, 0)])


@scenario("free_while_pausing")
def _(world: World) -> Step:
    block = world.allocate(SMALL, PINNED)
    world.allocate(SMALL, MMAP)
    step = world.free_in_transition(block, world.pause, lambda: world.hold(block))
    # Memory that could not be pinned, which a process reports once, was released with the block.
    step.tolerates = set(RELEASING)
    return step


@scenario("free_while_saving_to_disk")
def _(world: World) -> Step:
    block = world.allocate(SMALL, DISK)
    world.allocate(SMALL, DISK)
    return world.free_in_transition(block, world.pause, world.hold_copies)


@scenario("free_while_resuming")
def _(world: World) -> Step:
    block = world.allocate(SMALL, PINNED)
    world.allocate(SMALL, DISK)
    world.pause(None)
    return world.free_in_transition(block, world.resume, world.hold_copies)


@scenario("release_backup_views_after_free")
def _(world: World) -> Step:
    """Views of backups that outlive their allocations: the memory is released with them."""
    blocks = [world.allocate(SMALL, PINNED), world.allocate(SMALL, MMAP)]
    world.pause(None)
    views = [world.view(block) for block in blocks]
    for block in blocks:
        world.free(block)
    return world.free_step([], views.clear)


# ---- captures ----


@scenario("end_capture_with_deferred_frees")
def _(world: World) -> Step:
    """The frees that a capture deferred."""
    blocks = [world.allocate(SMALL, NONE), world.allocate(SMALL, NONE, device=1)]
    world.allocate(SMALL, NONE)
    world.capture_begin()
    for block in blocks:
        world.free(block)
    return world.free_step([], world.capture_end)


@scenario("allocate_in_capture")
def _(world: World) -> Step:
    """Outside any region, with the capture's settings: like autograd's threads for a graph pool."""
    block = world.allocate(SMALL, NONE)
    world.capture_begin("a")
    world.free(block)
    return world.allocate_step(lambda: world.allocate_outside(SMALL, "a"), out_of_memory=True)


@scenario("begin_capture", fresh=True)
def _(world: World) -> Step:
    return world.other_step(lambda: world.capture_begin("graph"))


# ---- the directory of backup files ----


def _set_directory(remains: bool) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        world.allocate(SMALL, DISK)
        world.pause(None)
        return world.directory_step(remains)

    return prepare


scenario("set_disk_directory")(_set_directory(False))
scenario("set_disk_directory_with_files_of_dead_process")(_set_directory(True))
