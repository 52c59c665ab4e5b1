"""Pause and resume of the model, with what each may leave when a call of the driver fails: part of the operations."""

from __future__ import annotations

import os
from typing import Any

from model_world import (
    ACTIVE,
    DAMAGED,
    FAILURES,
    PAUSED,
    TAGS,
    Actor,
    Allocation,
    Tags,
    World,
    describe_error,
    used_tags,
)

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

UNUSED_TAG = "never allocated with"


def choose_tags(world: World, choose: Any) -> Tags:
    kind = choose.integer(0, 9)
    if kind == 0:
        return (UNUSED_TAG, choose.pick(TAGS))
    if kind < 4:
        return None
    if kind < 6:
        return tuple(dict.fromkeys((choose.pick(TAGS), choose.pick(TAGS))))
    return (choose.pick(TAGS),)


def unknown_tags(tags: Tags) -> int:
    return sum(tag not in used_tags for tag in tags or ())


def pause(world: World, choose: Any) -> bool:
    pause_tags(world, choose.pick(world.actors), choose_tags(world, choose))
    return True


def pause_tags(world: World, actor: Actor, tags: Tags) -> None:
    selected = world.selected(tags, ACTIVE)
    had = bool(world.allocations) or something_waits()
    try:
        report = world.act(actor, lambda: saver.pause(tags))
    except errors.CaptureInProgressError:
        world.say(f"{actor.name}: pause({tags}) -> a capture is in progress")
        assert world.captures
        assert had
        return
    except FAILURES as error:
        world.say(f"{actor.name}: pause({tags}) -> {describe_error(error)}")
        assert world.rule, error
        after_failed_pause(world, selected)
        return
    world.say(f"{actor.name}: pause({tags}) -> {report}")
    after_pause(world, tags, selected, report)


def after_pause(world: World, tags: Tags, selected: list[Allocation], report: Any) -> None:
    assert not (world.captures and (world.allocations or something_waits())), "paused during a capture"
    if world.rule is None:
        world.repaired()
    world.moved_to_paused(selected)
    if world.rule is not None:
        reclaimed(world)
    copied = sum(allocation.size for allocation in selected if allocation.backup)
    expected = (len(selected), sum(a.reserved for a in selected), copied, unknown_tags(tags))
    assert (report.allocations, report.bytes, report.copied_bytes, report.unknown_tags) == expected, (report, expected)


def after_failed_pause(world: World, selected: list[Allocation]) -> None:
    """All that were selected stay, or all go, some of them perhaps DAMAGED."""
    states = {row[0]: row[5] for row in _core.segments()}
    now = {states[allocation.address] for allocation in selected}
    if now - {ACTIVE}:
        assert now <= {PAUSED, DAMAGED}, f"a failed pause left {now}"
        assert DAMAGED in now, "a pause that paused everything has failed"
        for allocation in selected:
            world.moved_to_paused([allocation], states[allocation.address])
    else:
        for allocation in selected:
            renewed_in_vain(world, allocation)
    world.observe_states({DAMAGED: (PAUSED,)})


def renewed_in_vain(world: World, allocation: Allocation) -> None:
    """A retained backup that the failed pause had begun to write over is no backup any more."""
    if allocation.copy is None or _core.host_backup(allocation.address, allocation.size) is not None:
        return
    allocation.copy = None
    for view in world.views:
        if view.owner is allocation:
            view.contents = None


def reclaimed(world: World) -> None:
    """Before anything else every pause and resume tries again what waits."""
    if world.captures:
        return
    if world.rule is not None:
        world.observe_states({DAMAGED: (PAUSED, ACTIVE)})
        return
    world.repaired()


def resume(world: World, choose: Any) -> bool:
    actor = choose.pick(world.actors)
    tags = choose_tags(world, choose)
    optional: dict[str, Any] = {}
    if choose.integer(0, 5) == 0:
        optional["timeout"] = choose.pick((0, 0.002))
    if choose.integer(0, 5) == 0 and "TMS_LOCK_DIR" in os.environ:
        optional["exclusive"] = True
    resume_tags(world, actor, tags, optional)
    return True


def resume_tags(world: World, actor: Actor, tags: Tags, optional: dict[str, Any]) -> None:
    selected = world.selected(tags, PAUSED) + (world.selected(tags, DAMAGED) if not world.captures else [])
    had = bool(world.allocations) or something_waits()
    sure = world.clean and not world.rule and not world.deferred
    lacks = world.lacks(selected)
    call = f"{actor.name}: resume({tags}, {optional})"
    try:
        report = world.act(actor, lambda: saver.resume(tags, **optional))
    except errors.CaptureInProgressError:
        world.say(f"{call} -> a capture is in progress")
        assert world.captures
        assert had
        return
    except FAILURES as error:
        world.say(f"{call} -> {describe_error(error)}")
        if world.rule is not None:
            passed_over(world, selected)
            world.observe_states({DAMAGED: (PAUSED,), PAUSED: (DAMAGED,)}, tags)
            world.observe_states({DAMAGED: (PAUSED,)})
            return
        assert isinstance(error, errors.OutOfMemoryError), error
        assert lacks, "there was memory enough"
        assert "missing" in str(error)
        world.repaired()
        return
    world.say(f"{call} -> {report}")
    assert not (sure and lacks), "resumed more than there was memory"
    after_resume(world, tags, selected, report)


def something_waits() -> bool:
    """What a call would try again, and perhaps wait for a device."""
    names = ("deferred_frees", "quarantined_handles", "quarantined_ranges", "quarantined_host", "quarantined_other")
    counters = _core.counters()
    return any(counters[name] for name in names)


def passed_over(world: World, selected: list[Allocation]) -> None:
    """A resume that found some damaged still has resumed the rest all the same, and fails."""
    states = {row[0]: row[5] for row in _core.segments()}
    resumed = [allocation for allocation in selected if states[allocation.address] == ACTIVE]
    if not resumed:
        return
    left = [allocation for allocation in selected if states[allocation.address] != ACTIVE]
    assert left, "a resume that resumed everything has failed"
    assert all(a.state == states[a.address] == DAMAGED for a in left), "a failed resume has resumed a part"
    world.moved_to_active(resumed)


def after_resume(world: World, tags: Tags, selected: list[Allocation], report: Any) -> None:
    assert not (world.captures and (world.allocations or something_waits())), "resumed during a capture"
    if world.rule is not None:
        states = {row[0]: row[5] for row in _core.segments()}
        assert all(states[a.address] == ACTIVE for a in selected), "resume left something paused"
        world.moved_to_active(selected)
        reclaimed(world)
    else:
        world.repaired()
        world.moved_to_active(selected)
    expected = (len(selected), sum(a.reserved for a in selected), unknown_tags(tags))
    assert (report.allocations, report.bytes, report.unknown_tags) == expected, (report, expected)
