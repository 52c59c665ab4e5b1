"""Operations during another thread's pause or resume, which is held by a gate, or by missing memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import model_runs as runs
from model_allocations import ACTIVE, PAUSED, Allocation, ResumeChoice
from model_comparison import reclaim_late
from model_machine import GRANULARITY
from model_operations import (
    allocate_on,
    choose_size,
    free_one,
    launch,
    write_bytes,
)
from model_pausing import after_failed_pause, after_pause, call_pause, choose_pause, choose_tags, unknown_tags
from model_settings import MAX_LEVELS, Operation, enter_region, leave_region
from model_world import FAILURES, MAX_ALLOCATIONS, World, describe_error

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

#: Calls that may fail once the pause has been released.
LATE_CALLS = ("*", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuCtxPopCurrent")


def quiet(world: World) -> bool:
    """Whether the result of a call is predictable although other threads act."""
    return world.clean and not world.captures and not world.deferred


def pause_held(world: World, choose: Any) -> bool:
    """A pause on another thread waits for work on the device; meanwhile there is more to do."""
    tags = choose_tags(world, choose)
    selected = world.selected(tags, ACTIVE)
    if not selected or not quiet(world):
        return False
    victim = choose.pick(selected)
    # It could not be released while the device is held, and the checks meanwhile would find it.
    reclaim_late()
    # Before the gate: a test case that hypothesis gives up ends with its next draw, and the gate would stay closed.
    choice = world.pausing = choose_pause(world, choose)
    gate = world.machine.new_gate()
    launch(world, victim, 7, gate)
    _, second, third = world.actors
    world.say(f"second: pause({tags}), held")
    assert second.worker is not None and third.worker is not None
    unknown = unknown_tags(tags)
    world.in_call = list(selected)
    join = second.worker.start(lambda: call_pause(tags, choice))
    world.machine.wait_until_synchronizing()
    world.machine.wait_for(lambda: _core.find(victim.address).state == _core.STATE_PAUSING)
    freed: list[Allocation] = []
    late: list[tuple[str, Callable[[], Any]]] = []
    rule = None
    try:
        for _ in range(choose.integer(1, 5)):
            meanwhile(world, choose, selected, freed, late)
        if not late and choose.integer(0, 2) == 0:
            rule = (choose.pick(LATE_CALLS), choose.integer(0, 6), choose.pick((1, 2, 1000)), 304)
            world.say(f"fault: {rule}")
            world.machine.fail(*rule)
    finally:
        fired = world.machine.fired()
        world.say(f"open the gate, {choice}")
        world.machine.open(gate)
        ended = finished(join)
        for step, wait in late:
            world.say(f"third: {step} ended")
            wait()
        world.leaving.clear()
        world.in_call.clear()
        if rule is not None:
            world.machine.fail(rule[0], 0, 0, 0)
    fired = world.machine.fired() - fired
    return conclude(world, tags, selected, freed, ended, fired, unknown)


def finished(join: Callable[[], Any]) -> Any:
    try:
        return join()
    except FAILURES as error:
        return error


def conclude(
    world: World, tags: Any, selected: list[Allocation], freed: list[Allocation], ended: Any, fired: int, unknown: int
) -> bool:
    """The outcome of the held pause. Allocations freed meanwhile count in its report, and are gone."""
    kept = [allocation for allocation in selected if allocation not in freed]
    world.clean = world.clean and not fired
    if isinstance(ended, Exception):
        world.say(f"second: pause -> {describe_error(ended)}")
        assert fired, ended
    else:
        world.say(f"second: pause -> {ended}")
        clean = world.clean
        after_pause(world, tags, selected, ended, unknown)
        world.clean = clean
        if fired:
            world.doubt_guards(kept)
    for allocation in freed:
        if isinstance(ended, Exception):
            # It may have overwritten a retained backup, which cannot be known any more.
            for view in (view for view in world.views if view.owner is allocation):
                view.contents = None
        world.forget(allocation)
    if isinstance(ended, Exception):
        after_failed_held_pause(world, kept)
    if fired and choose_to_settle(world):
        world.settle()
    return True


def after_failed_held_pause(world: World, kept: list[Allocation]) -> None:
    states = {row.address: row.state for row in _core.segments()}
    if kept and any(states[allocation.address] == PAUSED for allocation in kept):
        # The one that is DAMAGED may be one of those that were freed.
        for allocation in kept:
            assert states[allocation.address] in (PAUSED, _core.STATE_DAMAGED), allocation.described()
            world.moved_to_paused([allocation], states[allocation.address])
        return
    after_failed_pause(world, kept)


def choose_to_settle(world: World) -> bool:
    return world.operations % 2 == 0


def meanwhile(
    world: World,
    choose: Any,
    selected: list[Allocation],
    freed: list[Allocation],
    late: list[tuple[str, Callable[[], Any]]],
) -> None:
    """One operation while the pause is held: none may wait for the device on this thread."""
    main, _, third = world.actors
    kind = choose.integer(0, 8)
    others = [a for a in world.with_state(ACTIVE) if a not in selected]
    in_transition = [a for a in selected if a not in freed]
    if kind == 0 and len(world.allocations) < MAX_ALLOCATIONS:
        actor = main if late else choose.pick((main, third))
        allocate_on(world, actor, choose_size(choose), choose.integer(0, 1))
    elif kind == 1 and in_transition:
        allocation = choose.pick(in_transition)
        world.say(f"free {allocation.described()}, which is being paused")
        assert _core.free(allocation.address)
        freed.append(allocation)
    elif kind == 2 and freed:
        must_be_refused(choose.pick(freed).address)
    elif kind == 3:
        paused = [a for a in world.with_state(PAUSED) if not world.is_guarded(a)]  # the others wait for late reads
        if paused:
            free_one(world, main, choose.pick(paused))
    elif kind == 4 and in_transition:
        allocation = choose.pick(in_transition)
        assert _core.find(allocation.address).state == _core.STATE_PAUSING
        assert _core.host_backup(allocation.address, allocation.size) is None
        must_be_refused(allocation.address + choose.integer(1, allocation.reserved - 1))
    elif kind == 5 and others:
        allocation = choose.pick(others)
        write_other(world, choose, allocation)
    elif kind == 6 and others and not late:
        allocation = choose.pick(others)
        world.say(f"third: free {allocation.described()}, which waits for the device")
        late.append(("free", start_free(world, allocation)))
    elif kind == 7 and not late and third.worker is not None:
        world.say("third: pause of a tag without allocations, which waits for its turn")
        late.append(("pause", third.worker.start(lambda: saver.pause(()))))
    elif main_can_enter(world):
        enter_or_leave(world, choose)


def must_be_refused(address: int) -> None:
    try:
        _core.free(address)
    except errors.InvalidArgumentError:
        return
    raise AssertionError(f"free({address:#x}) was accepted")


def start_free(world: World, allocation: Allocation) -> Callable[[], Any]:
    third = world.actors[2]
    assert third.worker is not None
    join = third.worker.start(lambda: _core.free(allocation.address))
    world.machine.wait_for(lambda: _core.find(allocation.address) is None)
    world.forget(allocation)
    world.leaving.append(allocation)
    return join


def main_can_enter(world: World) -> bool:
    return len(world.actors[0].levels) < MAX_LEVELS


def enter_or_leave(world: World, choose: Any) -> None:
    everyone = world.actors
    world.actors = everyone[:1]  # the others are busy
    try:
        (enter_region if choose.integer(0, 1) else leave_region)(world, choose)
    finally:
        world.actors = everyone


def write_other(world: World, choose: Any, allocation: Allocation) -> None:
    everything = world.allocations
    world.allocations = [allocation]
    try:
        write_bytes(world, choose)
    finally:
        world.allocations = everything


def resume_waits(world: World, choose: Any) -> bool:
    """A resume on another thread waits for memory that others have; meanwhile some of its allocations are freed."""
    tags = choose_tags(world, choose)
    selected = world.selected(tags, PAUSED)
    if not selected or not quiet(world) or world.lacks(selected):
        return False
    device = choose.pick(selected).device
    need = sum(allocation.reserved for allocation in selected if allocation.device == device)
    room = world.room_for(selected, device)
    taken = min(world.free_bytes(device), room - need + GRANULARITY * choose.integer(1, need // GRANULARITY))
    if room - taken >= need:
        return False  # the guard page alone is enough
    world.say(f"others take {taken} bytes of device {device}; second: resume({tags}, timeout=inf)")
    world.machine.take(device, taken)
    world.machine.clear_counts()
    second = world.actors[1]
    assert second.worker is not None
    world.resuming = ResumeChoice(guard=world.guard)
    join = second.worker.start(lambda: saver.resume(tags, timeout=float("inf")))
    freed: list[Allocation] = []
    try:
        world.machine.wait_for(lambda: world.machine.calls("cuMemGetInfo") > LOOKS)
        for _ in range(choose.integer(0, 3)):
            wanted = [allocation for allocation in selected if allocation not in freed]
            if wanted:
                allocation = choose.pick(wanted)
                world.say(f"free {allocation.described()}, which is waited for")
                assert _core.free(allocation.address)
                freed.append(allocation)
    finally:
        world.machine.take(device, -taken)
        report = join()
    world.say(f"second: resume -> {report}")
    kept = [allocation for allocation in selected if allocation not in freed]
    moved = report.allocations
    assert len(kept) <= moved <= len(selected), report
    world.repaired()
    world.moved_to_active(kept, whole=False)  # the memory may have come when halves of a run were tried
    runs.doubt(freed)  # an attempt may have resumed them first: then they count as freed in their runs
    for allocation in freed:
        world.forget(allocation)
    return True


#: How often the waiting resume has looked for memory before the rest continues.
LOOKS = 1

#: Each with its frequency in the long runs.
THREADED: dict[Operation, int] = {pause_held: 3, resume_waits: 2}

__all__ = ["THREADED"]
