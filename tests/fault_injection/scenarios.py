"""Scenarios of pauses and resumes, which run while calls fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scenario import DISK, KINDS, LARGE, MMAP, NONE, PINNED, RETAIN, SMALL, scenario

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
scenario("pause_disk_again")(_pause_again(DISK))
scenario("pause_interruptible")(_pause(PINNED, interruptible=True))
scenario("resume_interruptible")(_resume(PINNED, interruptible=True))
scenario("resume_timeout")(_resume(MMAP, timeout=0.05))
scenario("resume_exclusive")(_resume(PINNED, exclusive=True))


@scenario("pause_retained")
def _(world: World) -> Step:
    world.retain(True)
    return _pause_again(PINNED)(world)


@scenario("resume_retained")
def _(world: World) -> Step:
    world.retain(True)
    world.allocate(SMALL, PINNED)
    world.allocate(LARGE, MMAP)
    world.cycle()
    world.pause(None)
    return world.resume_step()


@scenario("pause_exclusive")
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


@scenario("pause_mixture")
def _(world: World) -> Step:
    _mixture(world)
    world.pause(("a",))
    world.allocate(SMALL, PINNED, "a")
    return world.pause_step()


@scenario("resume_mixture")
def _(world: World) -> Step:
    _mixture(world)
    world.pause(None)
    world.allocate(SMALL, PINNED, "a")
    world.resume(("a",))
    world.pause(("a",))
    world.allocate(SMALL, MMAP, "a")
    return world.resume_step()


@scenario("pause_with_damaged")
def _(world: World) -> Step:
    world.damage(world.allocate(SMALL, PINNED, "damaged"))
    world.allocate(SMALL, MMAP)
    return world.repairing(world.pause_step())


@scenario("resume_with_damaged")
def _(world: World) -> Step:
    world.allocate(SMALL, MMAP)
    world.pause(None)
    world.damage(world.allocate(SMALL, PINNED, "damaged"))
    return world.repairing(world.resume_step())


@scenario("resume_from_two_directories")
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
        return world.pause_step(backup=backup)

    return prepare


for _name, _kind in CHOICES.items():
    scenario(f"pause_to_{_name}")(_pause_to(_kind))
    scenario(f"resume_from_{_name}")(_resume_from(_kind))
    scenario(f"pause_retained_to_{_name}")(_pause_retained_to(_kind))


@scenario("pause_disk_to_host_and_back")
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


# ---- live bytes ----


def _thinned(world: World) -> None:
    """Several ranges, the end of one, nothing at all, and everything; in host memory and in files."""
    world.thin(world.allocate(LARGE, PINNED), (0, 4096), (4096, 9000), (100_001, 2_000_001), (LARGE - 5, LARGE))
    world.thin(world.allocate(SMALL, MMAP), (SMALL - 70_000, SMALL))
    world.thin(world.allocate(SMALL, PINNED))
    world.thin(world.allocate(SMALL, MMAP), (0, SMALL))
    world.thin(world.allocate(LARGE, DISK), (1, 2), (4096, 1_500_000), (LARGE - 5, LARGE))
    world.thin(world.allocate(SMALL, DISK))
    world.allocate(SMALL, PINNED)


@scenario("pause_live")
def _(world: World) -> Step:
    _thinned(world)
    return world.pause_step(live=True)


@scenario("resume_live")
def _(world: World) -> Step:
    _thinned(world)
    world.pause(None, live=True)
    return world.resume_step()


@scenario("resume_live_zero")
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


@scenario("pause_preserved")
def _(world: World) -> Step:
    _preserved(world)
    return world.pause_step(live=True, preserves=True)


@scenario("resume_preserved")
def _(world: World) -> Step:
    _preserved(world)
    world.pause(None, live=True, preserves=True)
    return world.resume_step()


def _guarded(world: World) -> None:
    """With nothing, everything and a part in a backup, on two devices."""
    world.guard(True)
    world.allocate(LARGE, NONE)
    world.thin(world.allocate(LARGE, PINNED), (4096, 9000))
    world.allocate(SMALL, NONE, device=1)
    world.allocate(SMALL, PINNED, "other")


@scenario("pause_guarded")
def _(world: World) -> Step:
    _guarded(world)
    return world.pause_step(live=True)


@scenario("pause_guarded_more")
def _(world: World) -> Step:
    """With the page of an earlier pause."""
    _guarded(world)
    world.pause(("other",))
    return world.pause_step()


@scenario("resume_guarded")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None, live=True)
    return world.resume_step()


@scenario("resume_guarded_part")
def _(world: World) -> Step:
    """The pages stay for the rest."""
    _guarded(world)
    world.allocate(SMALL, NONE, "rest")
    world.pause(None)
    return world.resume_step(("a", "other"), interruptible=True)


@scenario("resume_guarded_pending")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None)
    return world.pending_step(stream=True)


@scenario("free_guarded")
def _(world: World) -> Step:
    _guarded(world)
    world.pause(None)
    return world.free_step(list(world.blocks.values()))


@scenario("pause_live_retained")
def _(world: World) -> Step:
    """Into memory that holds all of an earlier pause."""
    world.retain(True)
    block = world.allocate(LARGE, PINNED)
    world.cycle()
    world.rewrite()
    world.thin(block, (70_000, 80_000), (2_000_000, LARGE))
    return world.pause_step(live=True)


@scenario("resume_zero")
def _(world: World) -> Step:
    world.allocate(SMALL, NONE)
    world.allocate(LARGE, NONE, device=1)
    world.allocate(SMALL, PINNED)
    world.pause(None)
    return world.resume_step(zero=True)


# ---- a resume in the background ----


def _to_restore(world: World, *kinds: int) -> None:
    for number, kind in enumerate(kinds):
        world.allocate(SMALL, kind, device=number % 2)
    world.allocate(LARGE, PINNED)
    world.pause(None)


@scenario("resume_pending")
def _(world: World) -> Step:
    _to_restore(world, NONE, MMAP, DISK)
    return world.pending_step()


@scenario("resume_pending_zero")
def _(world: World) -> Step:
    _to_restore(world, NONE)
    return world.pending_step(zero=True, host_policy=RETAIN)


@scenario("resume_pending_stream")
def _(world: World) -> Step:
    _to_restore(world)
    return world.pending_step(stream=True)


@scenario("resume_pending_stream_two_devices")
def _(world: World) -> Step:
    _to_restore(world, NONE, PINNED, MMAP, MMAP)
    return world.pending_step(stream=True)


@scenario("resume_pending_stream_nothing")
def _(world: World) -> Step:
    """There is nothing to copy."""
    world.allocate(SMALL, NONE)
    world.pause(None)
    return world.pending_step(stream=True)


@scenario("resume_dropped")
def _(world: World) -> Step:
    _to_restore(world, NONE, DISK)
    return world.dropped_step()


# ---- two devices ----


@scenario("pause_two_devices")
def _(world: World) -> Step:
    world.allocate(SMALL, PINNED, device=0)
    world.allocate(SMALL, MMAP, device=1)
    return world.pause_step()


@scenario("resume_two_devices")
def _(world: World) -> Step:
    world.allocate(SMALL, PINNED, device=0)
    world.allocate(SMALL, MMAP, device=1)
    world.pause(None)
    return world.resume_step()


@scenario("refresh_peers", fresh=True)
def _(world: World) -> Step:
    """A device that comes into use after something was allocated on another."""
    world.use_device(0)
    world.allocate(SMALL, NONE)
    world.allocate(LARGE, NONE)
    world.use_device(1)
    return world.other_step(world.refresh_peers)
