"""Scenarios of pauses and resumes, by where the contents are kept and on which devices, which run while calls fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scenario import DISK, KINDS, LARGE, MMAP, NONE, PINNED, RELEASING, SMALL, scenario

if TYPE_CHECKING:
    from step import Step
    from world import World


# ---- pause and resume, by kind of backup ----


def _pause(kind: int, **options: Any) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        world.allocate(SMALL, kind)
        world.allocate(LARGE, kind)
        world.allocate(SMALL, kind, "other")
        return world.pause_step(("a",), **options)

    return prepare


def _pause_again(kind: int) -> Callable[[World], Step]:
    """With the space of an earlier pause still allocated."""

    def prepare(world: World) -> Step:
        world.allocate(SMALL, kind)
        world.allocate(LARGE, kind)
        world.cycle()
        world.rewrite()
        return world.pause_step()

    return prepare


def _resume(kind: int, **options: Any) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        world.allocate(SMALL, kind)
        world.allocate(LARGE, kind)
        world.allocate(SMALL, kind, "other")
        world.pause(None)
        return world.resume_step(("a",), **options)

    return prepare


for _name, _kind in KINDS.items():
    scenario(f"pause_{_name}")(_pause(_kind))
    scenario(f"resume_{_name}")(_resume(_kind))
scenario("pause_with_disk_backup_again")(_pause_again(DISK))
scenario("pause_interruptible")(_pause(PINNED, interruptible=True))
scenario("resume_interruptible")(_resume(PINNED, interruptible=True))


@scenario("pause_discarding_earlier_backups")
def _(world: World) -> Step:
    """The backups of what is paused already go, and memory that is resident is paused."""
    world.allocate(SMALL, PINNED)
    world.allocate(SMALL, DISK)
    world.pause(None)
    world.allocate(SMALL, MMAP)
    return world.pause_step(backup=NONE)


scenario("resume_with_timeout")(_resume(MMAP, timeout=0.05))
scenario("resume_exclusive")(_resume(PINNED, exclusive=True))
scenario("resume_exclusive_with_timeout")(_resume(PINNED, exclusive=True, timeout=0.2))  # with a ticket, if a lock is held


@scenario("pause_with_retained_backups")
def _(world: World) -> Step:
    world.retain(True)
    step = _pause_again(PINNED)(world)
    step.tolerates = set(RELEASING)
    return step


@scenario("pause_saving_what_has_changed")
def _(world: World) -> Step:
    """A part of one backup has changed, all of another, and nothing of a third."""
    world.retain(True)
    part = world.allocate(LARGE, PINNED)
    whole = world.allocate(SMALL, MMAP)
    world.allocate(LARGE, MMAP)
    world.cycle()
    world.change(part)
    world.rewrite(whole)
    step = world.pause_step()
    step.tolerates = set(RELEASING)
    return step


@scenario("pause_writing_what_has_changed")
def _(world: World) -> Step:
    """A block of one file has changed, and nothing of another."""
    world.retain(True)
    part = world.allocate(LARGE, DISK)
    world.allocate(SMALL, DISK)
    world.cycle()
    world.change(part)
    step = world.pause_step()
    step.tolerates = set(RELEASING)
    return step


@scenario("resume_with_retained_backups")
def _(world: World) -> Step:
    world.retain(True)
    world.allocate(SMALL, PINNED)
    world.allocate(LARGE, MMAP)
    world.cycle()
    world.pause(None)
    return world.resume_step()


@scenario("pause_that_releases_device_lock")
def _(world: World) -> Step:
    """The pause releases the lock of the device."""
    world.allocate(SMALL, NONE)
    world.pause(None)
    world.resume(None, exclusive=True)
    world.rewrite()
    step = world.pause_step()
    step.tolerates = {"ftruncate"}  # the lock file then names its last holder, which others read only if the lock is held
    return step


# ---- mixtures ----


def _mixture(world: World) -> None:
    for number, kind in enumerate(KINDS.values()):
        world.allocate(SMALL, kind, "ab"[number % 2])
        world.allocate(LARGE if number == DISK else SMALL, kind, "b", device=number % 2)


@scenario("pause_mixed_backups_on_two_devices")
def _(world: World) -> Step:
    _mixture(world)
    world.pause(("a",))
    world.allocate(SMALL, PINNED, "a")
    return world.pause_step()


@scenario("resume_mixed_backups_on_two_devices")
def _(world: World) -> Step:
    _mixture(world)
    world.pause(None)
    world.allocate(SMALL, PINNED, "a")
    world.resume(("a",))
    world.pause(("a",))
    world.allocate(SMALL, MMAP, "a")
    return world.resume_step()


@scenario("pause_with_damaged_memory")
def _(world: World) -> Step:
    world.damage(world.allocate(SMALL, PINNED, "damaged"))
    world.allocate(SMALL, MMAP)
    return world.repairing(world.pause_step())


@scenario("resume_with_damaged_memory")
def _(world: World) -> Step:
    world.allocate(SMALL, MMAP)
    world.pause(None)
    world.damage(world.allocate(SMALL, PINNED, "damaged"))
    return world.repairing(world.resume_step())


@scenario("resume_from_two_disk_directories")
def _(world: World) -> Step:
    world.allocate(SMALL, DISK)
    world.pause(None)
    world.set_directory(world.new_directory())
    world.allocate(SMALL, DISK)
    world.pause(None)
    return world.resume_step()


# ---- another place for the contents, this time ----

CHOICES = {"host": PINNED, "disk": DISK, "discard": NONE}
PART = 100_003


def _each_kind(world: World) -> None:
    for kind in KINDS.values():
        world.allocate(PART, kind)
    world.allocate(PART, PINNED, "other")


def _pause_to(backup: int) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        _each_kind(world)
        return world.pause_step(("a",), backup=backup)

    return prepare


def _resume_from(backup: int) -> Callable[[World], Step]:
    def prepare(world: World) -> Step:
        _each_kind(world)
        world.pause(("a",), backup=backup)
        return world.resume_step()

    return prepare


def _pause_retained_to(backup: int) -> Callable[[World], Step]:
    """A retained backup is out of date, and is released when contents go elsewhere."""

    def prepare(world: World) -> Step:
        world.retain(True)
        world.allocate(SMALL, PINNED)
        world.allocate(LARGE, MMAP)
        world.cycle()
        world.rewrite()
        step = world.pause_step(backup=backup)
        step.tolerates = set(RELEASING)
        return step

    return prepare


for _name, _kind in CHOICES.items():
    scenario(f"pause_each_kind_to_{_name}")(_pause_to(_kind))
    scenario(f"resume_after_pause_to_{_name}")(_resume_from(_kind))
    scenario(f"pause_to_{_name}_with_retained_backups")(_pause_retained_to(_kind))


@scenario("pause_to_disk_after_pause_to_host")
def _(world: World) -> Step:
    """A file of an earlier pause is there, and then host memory."""
    world.allocate(SMALL, DISK)
    world.allocate(SMALL, PINNED)
    world.cycle()
    world.rewrite()
    world.pause(None, backup=PINNED)
    world.resume(None)
    world.rewrite()
    return world.pause_step(backup=DISK)


# ---- two devices ----


@scenario("pause_on_two_devices")
def _(world: World) -> Step:
    world.allocate(SMALL, PINNED, device=0)
    world.allocate(SMALL, MMAP, device=1)
    return world.pause_step()


@scenario("resume_on_two_devices")
def _(world: World) -> Step:
    world.allocate(SMALL, PINNED, device=0)
    world.allocate(SMALL, MMAP, device=1)
    world.pause(None)
    return world.resume_step()
