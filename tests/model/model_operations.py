"""The operations on managed memory, one a function: it chooses, acts on the core, and updates the model. Pause and resume
are in model_pausing.py.

Each returns False if there was nothing to choose from. OPERATIONS has all of them with their frequency in the long runs.
"""

from __future__ import annotations

from typing import Any

import model_runs as runs
from model_actors import Actor, Level
from model_allocations import ACTIVE, DAMAGED, DEVICES, PAUSED, Allocation, Tags, View
from model_machine import GRANULARITY, MIB, write
from model_pausing import choose_pause, count_guard_bytes, pause, pause_tags, resume
from model_settings import SETTINGS, Operation, choose_level
from model_world import FAILURES, MAX_ALLOCATIONS, World, describe_error

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

MAX_CAPTURES = 2
MAX_VIEWS = 4
#: How many allocations a loader makes at once.
MAX_LOADED = 5


# Memory.


def allocate(world: World, choose: Any) -> bool:
    if len(world.allocations) >= MAX_ALLOCATIONS:
        return False
    actor = choose.pick(world.actors)
    device = choose.integer(0, DEVICES - 1)
    size = choose_size(choose)
    allocate_on(world, actor, size, device)
    return True


def load(world: World, choose: Any) -> bool:
    """Several allocations of one kind one after the other, as a program makes that loads weights. They are neighbours."""
    if len(world.allocations) + MAX_LOADED > MAX_ALLOCATIONS:
        return False
    actor, device = choose.pick(world.actors), choose.integer(0, DEVICES - 1)
    for _ in range(choose.integer(2, MAX_LOADED)):
        allocate_on(world, actor, choose.integer(1, 2 * GRANULARITY), device)
    return True


def free_in_run(world: World, choose: Any) -> bool:
    """One of several allocations of a run: its memory becomes slack."""
    members = runs.runs_of(world.with_state(ACTIVE)).values()
    together = [one for run in members if len(run) > 1 for one in run]
    if not together:
        return False
    free_one(world, choose.pick(world.actors), choose.pick(together))
    return True


def refill(world: World, choose: Any) -> bool:
    """An allocation of a kind that has slack, which may be too small."""
    beside = [one for one in world.with_state(ACTIVE) if runs.has_slack(world, one)]
    if not beside:
        return False
    actor, other = world.actors[0], choose.pick(beside)
    level = Level(other.tag, other.backup, True, other.policy, choose.integer(0, 5) > 0)
    world.change_level(actor, level)
    allocate_on(world, actor, choose.integer(1, 2 * GRANULARITY), other.device)
    return True


def refill_after_new_device(world: World, choose: Any) -> bool:
    """Use a device without managed memory while there is slack, and then make an allocation that may get this slack. After
    the allocation the device has access to all resident memory."""
    has_slack = any(runs.has_slack(world, one) for one in world.with_state(ACTIVE))
    if not has_slack or len(world.in_use) == world.machine.devices():
        return False
    device = world.in_use[-1] + 1
    world.say(f"device {device} comes into use")
    with world.machine.context(device):
        pass
    world.in_use.append(device)
    return refill(world, choose)


def choose_size(choose: Any) -> int:
    kind = choose.integer(0, 7)
    if kind == 0:
        return int(choose.integer(1, 64))
    if kind == 1:
        return int(choose.integer(1, 7)) * GRANULARITY
    if kind == 2:
        return int(choose.integer(GRANULARITY - 2, GRANULARITY + 2))
    if kind == 3:
        return int(choose.integer(1, 8 * MIB))
    return int(choose.integer(1, 64 << 10))


def allocate_on(world: World, actor: Actor, size: int, device: int) -> Allocation | None:
    level = world.settings(actor)
    rounded = -(-size // GRANULARITY) * GRANULARITY
    free = world.free_bytes(device)
    fits = rounded <= free and (not world.margin or free - rounded >= world.margin)
    refused_by_margin = bool(world.margin) and not fits
    reclaims = not refused_by_margin and not fits and not world.captures
    kind = runs.KindKey(level.tag, level.backup, level.policy, device)
    reuses = world.clean and level.runs and runs.reusable(world, kind, rounded)
    outcome = f"{actor.name}: allocate({size}, device {device}) with {level}"
    try:
        address = world.act(actor, lambda: _core.allocate(size, device))
    except FAILURES as error:
        world.say(f"{outcome} -> {describe_error(error)}")
        assert not reuses, "there was slack"
        runs.memory_was_short(world, error)
        if world.rule is None:
            assert isinstance(error, errors.OutOfMemoryError), error
            assert not fits
        if reclaims:
            reclaimed_perhaps(world)
        return None
    allocation = world.new_allocation(address, size, device, level)
    reused = allocation.run != allocation.span
    assert reused == reuses or not world.clean, f"{allocation.described()}: reused slack, or should have"
    assert fits or reused or world.rule or (reclaims and not (world.clean and not world.deferred)), "more than there was"
    if reclaims and not reused:
        reclaimed_perhaps(world)
    world.say(f"{outcome} -> {allocation} at {address:#x}")
    assert address % GRANULARITY == 0
    if world.clean and world.rule is None:
        world.check_access()
    return allocation


def reclaimed_perhaps(world: World) -> None:
    """An allocation that found no memory has retried what the driver refused before."""
    if world.rule or not world.clean:
        world.observe_states({DAMAGED: (PAUSED,)})
    if not world.captures and not _core.counters()["deferred_frees"]:
        world.finish_deferred()


def free(world: World, choose: Any) -> bool:
    if not world.allocations:
        return False
    allocation = choose.pick(world.allocations)
    actor = choose.pick(world.actors)
    free_one(world, actor, allocation)
    return True


def free_one(world: World, actor: Actor, allocation: Allocation) -> None:
    world.say(f"{actor.name}: free {allocation.described()}")
    if (allocation.state != PAUSED or world.is_guarded(allocation)) and world.captures:
        world.deferred.append(allocation)
    world.forget(allocation)
    assert world.act(actor, lambda: _core.free(allocation.address))


def free_wrongly(world: World, choose: Any) -> bool:
    """Addresses that are not the start of an allocation: the free has no effect."""
    live = {allocation.address: allocation for allocation in world.allocations}
    if live and choose.integer(0, 1):
        allocation = choose.pick(world.allocations)
        address = allocation.address + choose.integer(1, allocation.reserved - 1)
        world.say(f"free({address:#x}), inside {allocation}")
        try:
            _core.free(address)
        except errors.InvalidArgumentError:
            return True
        raise AssertionError("the free of an interior pointer was accepted")
    addresses = [address for address in world.freed if not any(a <= address < a + x.reserved for a, x in live.items())]
    address = choose.pick([*addresses, 0x1000])
    world.say(f"free({address:#x}), not managed")
    assert _core.free(address) is False
    return True


def write_bytes(world: World, choose: Any) -> bool:
    active = world.with_state(ACTIVE)
    if not active:
        return False
    allocation = choose.pick(active)
    assert allocation.contents is not None
    begin = choose.integer(0, allocation.size - 1)
    begin = 0 if choose.integer(0, 2) == 0 else begin
    size = min(allocation.size - begin, choose.pick((1, 4096, 1 << 20, allocation.size)))
    offset = choose.integer(0, max(0, len(world.payload) - size))
    data = world.payload[offset : offset + size]
    world.say(f"write {len(data)} bytes at {begin} of {allocation}")
    write(allocation.address + begin, data)
    allocation.contents = allocation.contents[:begin] + data + allocation.contents[begin + len(data) :]
    return True


_ADDED = {value: bytes((byte + value) % 256 for byte in range(256)) for value in (1, 7, 255)}


def run_kernel(world: World, choose: Any) -> bool:
    """Work on the device that is not waited for: a pause or a free must wait for it."""
    active = world.with_state(ACTIVE)
    if not active or world.captures:
        return False
    allocation = choose.pick(active)
    value = choose.pick(tuple(_ADDED))
    launch(world, allocation, value, 0)
    if choose.integer(0, 2):
        world.machine.synchronize(allocation.device)
        return True
    tags: Tags = None if choose.integer(0, 1) else (allocation.tag,)
    pause_tags(world, choose.pick(world.actors), tags, choose_pause(world, choose))
    if allocation.state == ACTIVE:
        world.machine.synchronize(allocation.device)
    return True


def launch(world: World, allocation: Allocation, value: int, gate: int) -> None:
    assert allocation.contents is not None
    world.say(f"kernel: add {value} to {allocation}, gate {gate}")
    world.machine.add(allocation.device, allocation.address, allocation.size, value, gate=gate)
    allocation.contents = allocation.contents.translate(_ADDED[value])


# Backups.


def look_at_backup(world: World, choose: Any) -> bool:
    """Keeps a host backup alive beyond its allocation."""
    backed = [a for a in world.allocations if a.whole_copy is not None and a.state != DAMAGED]
    if not backed or len(world.views) >= MAX_VIEWS:
        return False
    allocation = choose.pick(backed)
    buffer = _core.host_backup(allocation.address, allocation.size)
    assert buffer is not None
    world.say(f"hold the backup of {allocation}")
    world.views.append(View(buffer, allocation, buffer.address, allocation.buffer, allocation.copy))
    return True


def drop_backup_view(world: World, choose: Any) -> bool:
    if not world.views:
        return False
    world.say("let a backup go")
    world.views.pop(choose.integer(0, len(world.views) - 1))
    return True


def spoil_file(world: World, choose: Any) -> bool:
    """A byte of every backup file changes: a resume reports it and changes nothing; with the byte restored it succeeds."""
    on_disk = [a for a in world.with_state(PAUSED) if a.saved == _core.BACKUP_DISK and a.kept]
    if not on_disk or world.captures or not world.clean:
        return False
    tags = (choose.pick(on_disk).tag,)
    selected = world.selected(tags, PAUSED)
    if world.lacks(selected):
        return False
    world.say(f"spoil the files, resume({tags})")
    flip_a_byte(world)
    try:
        saver.resume(tags)
    except errors.BackupIOError:
        world.doubt_guards(selected)
    else:
        raise AssertionError("a changed backup file was taken for the contents")
    flip_a_byte(world)
    return True


def flip_a_byte(world: World) -> None:
    for path in world.files():
        with path.open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 0x10]))


# Captures.


def begin_capture(world: World, choose: Any) -> bool:
    if len(world.captures) >= MAX_CAPTURES:
        return False
    level = choose_level(world, choose) if choose.integer(0, 1) else None
    if level:
        level.managed = True
    world.say(f"capture_begin({level})")
    if level:
        _core.capture_begin(level.tag, level.backup, level.policy, level.runs)
    else:
        _core.capture_begin(None, 0)
    world.captures.append(level)
    return True


def end_capture(world: World, choose: Any) -> bool:
    if not world.captures:
        return False
    world.say("capture_end()")
    world.act(world.actors[0], _core.capture_end)
    world.captures.pop()
    if world.captures:
        return True
    if world.rule is None:
        world.repaired()
        return True
    world.observe_states({DAMAGED: (PAUSED,)})
    if not _core.counters()["deferred_frees"]:
        world.finish_deferred()
    return True


#: Each with its frequency in the long runs.
OPERATIONS: dict[Operation, int] = SETTINGS | {
    allocate: 22,
    load: 14,
    free: 14,
    free_in_run: 8,
    refill: 8,
    refill_after_new_device: 2,
    free_wrongly: 3,
    write_bytes: 20,
    run_kernel: 5,
    pause: 18,
    resume: 22,
    count_guard_bytes: 5,
    look_at_backup: 4,
    drop_backup_view: 3,
    spoil_file: 1,
    begin_capture: 2,
    end_capture: 8,
}
