"""The operations that change settings: regions, and what applies to the process. Part of the operations of
model_operations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_actors import Level
from model_allocations import BACKUPS, DEVICES
from model_machine import GRANULARITY, MIB
from model_pausing import POLICIES
from model_world import World

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MAX_LEVELS = 5
Operation = Callable[[World, Any], bool]


def choose_level(world: World, choose: Any) -> Level:
    """Mostly one of a few kinds, so that there are neighbours."""
    if choose.integer(0, 2):
        return Level(world.tags[0], choose.pick(BACKUPS[:2]), True)
    policy = choose.pick((_core.HOST_DEFAULT, _core.HOST_DEFAULT, *POLICIES.values()))
    managed, runs = choose.integer(0, 5) > 0, choose.integer(0, 5) > 0
    return Level(choose.pick(world.tags), choose.pick(BACKUPS), managed, policy, runs)


def enter_region(world: World, choose: Any) -> bool:
    actor = choose.pick(world.actors)
    if len(actor.levels) >= MAX_LEVELS:
        return False
    level = choose_level(world, choose)
    identity = actor.call(lambda: _core.region_enter(level.tag, level.backup, level.managed, level.policy, level.runs))
    actor.levels.append(level)
    world.say(f"{actor.name}: region_enter({level}) -> {identity}")
    assert identity not in [0, *(other for one in world.actors for other in one.ids)]
    actor.ids.append(identity)
    return True


def leave_region(world: World, choose: Any) -> bool:
    """One level, not always the innermost."""
    actors = [actor for actor in world.actors if actor.levels]
    if not actors:
        return False
    actor = choose.pick(actors)
    depth = choose.integer(1, len(actor.levels))
    identity = actor.ids.pop(depth - 1)
    del actor.levels[depth - 1]
    world.say(f"{actor.name}: region_leave({identity})")
    assert actor.call(lambda: _core.region_leave(identity)) == len(actor.levels) - depth + 1
    return True


def change_region(world: World, choose: Any) -> bool:
    actor = choose.pick(world.actors)
    level = choose_level(world, choose)
    world.say(f"{actor.name}: region_set({level})")
    world.change_level(actor, level)
    return True


def set_host_memory(world: World, choose: Any) -> bool:
    name = choose.pick(tuple(POLICIES))
    world.policy = POLICIES[name]
    world.say(f"host_memory = {name}")
    if name == "retain" and choose.integer(0, 1):
        saver.retain_cpu_backup = True
    else:
        saver.host_memory = name
    return True


def set_guard(world: World, choose: Any) -> bool:
    """Also while memory is paused."""
    world.guard = choose.integer(0, 1) == 1
    world.say(f"guard = {world.guard}")
    saver.guard = world.guard
    return True


def reserve_host_memory(world: World, choose: Any) -> bool:
    """In the background, concurrently with other operations."""
    size, device = choose.integer(0, 9) * MIB, choose.integer(0, DEVICES - 1)
    world.say(f"reserve_host_memory({size}, {device})")
    World.reserved = max(World.reserved, size + GRANULARITY)  # it is rounded up
    _core.reserve_host_memory(size, device)
    return True


def release_host_memory(world: World, choose: Any) -> bool:
    world.say("release_host_memory()")
    saver.release_host_memory()
    return True


def set_margin(world: World, choose: Any) -> bool:
    world.margin = choose.pick((0, 0, 2 * MIB, 12 * MIB))
    world.say(f"memory_margin_bytes = {world.margin}")
    saver.memory_margin_bytes = world.margin
    return True


def set_directory(world: World, choose: Any) -> bool:
    world.directory = choose.pick(world.directories)
    world.say(f"set_disk_backup_dir({world.directory.name})")
    _core.set_disk_directory(str(world.directory))
    return True


def take_memory(world: World, choose: Any) -> bool:
    """Another process takes memory, or releases some of it."""
    device = choose.integer(0, DEVICES - 1)
    free = world.free_bytes(device) // GRANULARITY
    taken = world.machine.taken[device] // GRANULARITY - world.others[device]
    size = choose.pick((choose.integer(-taken, free), -taken)) * GRANULARITY
    world.say(f"others take {size} bytes of device {device}")
    world.machine.take(device, size)
    return True


#: Each with its frequency in the long runs.
SETTINGS: dict[Operation, int] = {
    enter_region: 10,
    leave_region: 6,
    change_region: 3,
    set_host_memory: 4,
    set_guard: 3,
    reserve_host_memory: 1,
    release_host_memory: 1,
    set_margin: 2,
    set_directory: 2,
    take_memory: 4,
}
