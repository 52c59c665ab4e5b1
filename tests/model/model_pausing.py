"""Pause and resume of the model, and their possible effects when a call of the driver fails: part of the operations."""

from __future__ import annotations

import itertools
import os
from array import array
from typing import Any

import model_runs as runs
from model_actors import Actor
from model_allocations import ACTIVE, DAMAGED, PAUSED, Allocation, PauseChoice, ResumeChoice, Tags, total, used_tags
from model_world import FAILURES, World, describe_error

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

#: The arguments `backup` of pause() and `host_memory` of resume() and region().
BACKUPS_BY_NAME = {
    "host": _core.BACKUP_PINNED,
    "mmap": _core.BACKUP_MMAP,
    "disk": _core.BACKUP_DISK,
    "discard": _core.BACKUP_NONE,
}
NAMES_OF_BACKUPS: dict[int | None, Any] = {number: name for name, number in BACKUPS_BY_NAME.items()}
POLICIES = {"release": _core.HOST_RELEASE, "pool": _core.HOST_POOL, "retain": _core.HOST_RETAIN}

UNUSED_TAG = "never allocated with"
#: For each of World.tags, without its number. Each matches one tag of a world only.
PATTERNS = ("model we*", "[lm]odel ?ache", "mo*l [!bcw]*")
UNUSED_PATTERN = "never [a-z]*"


def choose_tags(world: World, choose: Any) -> Tags:
    kind = choose.integer(0, 9)
    if kind == 0:
        return (UNUSED_TAG, choose.pick(world.tags))
    if kind < 4:
        return None
    if kind < 6:
        return tuple(dict.fromkeys((choose.pick(world.tags), choose.pick(world.tags))))
    return (choose.pick(world.tags),)


def spelled(world: World, tags: Tags, choose: Any) -> Tags:
    """The same selection as it is given to pause and resume: sometimes with patterns that stand for these tags."""
    if tags is None or choose.integer(0, 3):
        return tags
    if set(tags) == set(world.tags) and used_tags.issuperset(world.tags):
        return (f"model [!b]* {world.number}",)
    patterns = {tag: f"{pattern} {world.number}" for tag, pattern in zip(world.tags, PATTERNS, strict=True)}
    return tuple(patterns.get(tag, UNUSED_PATTERN) for tag in tags)


def unknown_tags(tags: Tags) -> int:
    return sum(tag not in used_tags for tag in tags or ())


def choose_pause(world: World, choose: Any) -> PauseChoice:
    """Mostly with the regions' settings, and all tags."""
    choice = PauseChoice()
    if choose.integer(0, 3) == 0:
        choice.backup = choose.pick(tuple(BACKUPS_BY_NAME.values()))
    if choose.integer(0, 3) == 0:
        choice.live = {}
        choice.preserves = choose.integer(0, 1) == 1
        for allocation in world.allocations:
            kind = choose.integer(0, 4)
            if kind == 0:
                continue
            cuts = [choose.integer(0, allocation.size) for _ in range(2 * (kind - 1))]
            cuts.sort()
            ranges = list(zip(cuts[::2], cuts[1::2], strict=True)) if kind < 4 else [(0, allocation.size)]
            choice.live[allocation.address] = [(begin, end) for begin, end in ranges if begin < end]
    return choice


def call_pause(tags: Tags, choice: PauseChoice, asked: Tags = None) -> Any:
    """`asked`: another spelling of the tags."""
    if choice.live is None:
        return saver.pause(asked or tags, backup=NAMES_OF_BACKUPS.get(choice.backup))
    live = choice.live

    def find_live() -> tuple[bytes, bytes]:
        addresses, ends = array("Q", sorted(live)), array("Q")
        for address in addresses:
            for begin, end in live[address]:
                ends.extend((address + begin, address + end))
        return addresses.tobytes(), ends.tobytes()

    return _core.pause(tags, None, False, choice.backup, find_live, preserves=choice.preserves)


def pause(world: World, choose: Any) -> bool:
    actor, tags = choose.pick(world.actors), choose_tags(world, choose)
    choice = choose_pause(world, choose)
    pause_tags(world, actor, tags, choice, spelled(world, tags, choose))
    return True


def pause_tags(world: World, actor: Actor, tags: Tags, choice: PauseChoice, asked: Tags = None) -> None:
    selected = world.selected(tags, ACTIVE)
    had = bool(world.allocations) or something_waits()
    world.pausing = choice
    call = f"{actor.name}: pause({asked or tags}, {choice})"
    try:
        report = world.act(actor, lambda: call_pause(tags, choice, asked))
    except errors.CaptureInProgressError:
        world.say(f"{call} -> a capture is in progress")
        assert world.captures
        assert had or something_waits()  # a thread of the library's may have met a failure meanwhile
        return
    except FAILURES as error:
        world.say(f"{call} -> {describe_error(error)}")
        assert world.rule, error
        runs.memory_was_short(world, error, exact=False)
        after_failed_pause(world, selected)
        return
    world.say(f"{call} -> {report}")
    after_pause(world, tags, selected, report)


def after_pause(world: World, tags: Tags, selected: list[Allocation], report: Any, unknown: int | None = None) -> None:
    """`unknown`: how many of the tags no allocation had when the pause began, if that may have changed."""
    assert not (world.captures and (world.allocations or something_waits(host=False))), "paused during a capture"
    if world.rule is None:
        world.repaired()
    copied = sum(world.pausing.copied(allocation) for allocation in selected)
    world.moved_to_paused(selected)
    if world.rule is not None:
        reclaimed(world)
    if world.pausing.backup == _core.BACKUP_NONE:
        for allocation in world.selected(tags, PAUSED, DAMAGED):
            allocation.gives_up()
            world.detach_views(allocation)
    unknown = unknown_tags(tags) if unknown is None else unknown
    expected = (len(selected), sum(a.reserved for a in selected), copied, unknown)
    kept = report.copied_bytes + report.unchanged_bytes
    assert (report.allocations, report.bytes, kept, report.unknown_tags) == expected, (report, expected)
    safe = sum(total(each.kept) for each in selected if each.saved == _core.BACKUP_DISK or not world.looks)
    assert report.unchanged_bytes <= safe, "a program may have written to a backup, but not all was copied"
    World.unchanged += report.unchanged_bytes


def after_failed_pause(world: World, selected: list[Allocation]) -> None:
    """All selected allocations stay active, or all are paused, some of them perhaps DAMAGED."""
    states = {row.address: row.state for row in _core.segments()}
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
    """A retained backup that the failed pause had begun to overwrite has no contents any more; its memory or file stays."""
    if allocation.saved == _core.BACKUP_DISK:
        row = _core.find(allocation.address)
        assert row is not None
        if row.backup_bytes != total(allocation.kept):
            allocation.loses_contents_of_backup()
        return
    if not allocation.kept or not allocation.buffer:
        return
    begin, end = allocation.kept[0]
    # Its counted bytes do not show it: a file that it has as well counts if there is no other backup.
    if _core.host_backup(allocation.address + begin, end - begin) is not None:
        return
    allocation.loses_contents_of_backup()
    for view in world.views:
        if view.owner is allocation:
            view.contents = None


def reclaimed(world: World) -> None:
    """Every pause and resume first retries what awaits release."""
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
    if choose.integer(0, 3) == 0:
        optional["zero"] = True
    if choose.integer(0, 3) == 0:
        optional["host_memory"] = choose.pick(tuple(POLICIES))
    if choose.integer(0, 3) == 0:
        optional["wait"] = False
    resume_tags(world, actor, tags, optional, spelled(world, tags, choose))
    return True


def call_resume(tags: Tags, optional: dict[str, Any]) -> Any:
    begun = saver.resume(tags, **optional)
    return begun if optional.get("wait", True) else begun.wait()


def resume_tags(world: World, actor: Actor, tags: Tags, optional: dict[str, Any], asked: Tags = None) -> None:
    selected = world.selected(tags, PAUSED) + (world.selected(tags, DAMAGED) if not world.captures else [])
    had = bool(world.allocations) or something_waits()
    sure = world.clean and not world.rule and not world.deferred
    lacks = world.lacks(selected)
    call = f"{actor.name}: resume({asked or tags}, {optional})"
    policy = POLICIES.get(optional.get("host_memory", ""), 0)
    world.resuming = ResumeChoice(policy, optional.get("zero", False), world.guard)
    try:
        report = world.act(actor, lambda: call_resume(asked or tags, optional))
    except errors.CaptureInProgressError:
        world.say(f"{call} -> a capture is in progress")
        assert world.captures
        assert had or something_waits()  # a thread of the library's may have met a failure meanwhile
        return
    except FAILURES as error:
        world.say(f"{call} -> {describe_error(error)}")
        world.doubt_guards(selected)
        runs.memory_was_short(world, error)
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


def count_guard_bytes(world: World, choose: Any) -> bool:
    """Of ranges of every allocation. It waits and retries as a pause does, and moves nothing."""
    actor, tags = choose.pick(world.actors), choose_tags(world, choose)
    ranges, expected = array("Q"), []
    for allocation in sorted(world.allocations, key=lambda one: one.address):
        cuts = sorted({choose.integer(0, allocation.size) for _ in range(4)})
        for begin, end in itertools.pairwise(cuts):
            ranges.extend((allocation.address + begin, allocation.address + end))
            held = (allocation.contents or b"")[begin:end]
            resident = allocation.state == ACTIVE and (tags is None or allocation.tag in tags)
            expected.append(held.count(_core.GUARD_BYTE) if resident else None)
    had = bool(world.allocations) or something_waits()
    call = f"{actor.name}: count_guard_bytes({tags}, {len(expected)} ranges)"
    try:
        counts = world.act(actor, lambda: _core.count_guard_bytes(tags, None, ranges.tobytes()))
    except errors.CaptureInProgressError:
        world.say(f"{call} -> a capture is in progress")
        assert world.captures
        assert had or something_waits()
        return True
    except FAILURES as error:
        world.say(f"{call} -> {describe_error(error)}")
        assert world.rule, error
        world.observe_states({DAMAGED: (PAUSED,)})
        return True
    world.say(f"{call} -> {counts}")
    assert counts == expected
    if world.rule is None:
        world.repaired()
    else:
        reclaimed(world)
    return True


def something_waits(host: bool = True) -> bool:
    """What a call would retry, and perhaps wait for a device. `host`: host memory counts, whose wait may begin after the
    call, because a thread of the library's releases it."""
    names = ["deferred_frees", "quarantined_handles", "quarantined_ranges", "quarantined_other"]
    names += ["quarantined_host"] if host else []
    counters = _core.counters()
    return any(counters[name] for name in names)


def passed_over(world: World, selected: list[Allocation]) -> None:
    """A resume that found some damaged has still resumed the rest, and fails."""
    states = {row.address: row.state for row in _core.segments()}
    resumed = [allocation for allocation in selected if states[allocation.address] == ACTIVE]
    if not resumed:
        return
    left = [allocation for allocation in selected if states[allocation.address] != ACTIVE]
    assert left, "a resume that resumed everything has failed"
    assert all(a.state == states[a.address] == DAMAGED for a in left), "a failed resume has resumed a part"
    world.moved_to_active(resumed, whole=False)


def after_resume(world: World, tags: Tags, selected: list[Allocation], report: Any) -> None:
    assert not (world.captures and (world.allocations or something_waits(host=False))), "resumed during a capture"
    if world.rule is not None:
        states = {row.address: row.state for row in _core.segments()}
        assert all(states[a.address] == ACTIVE for a in selected), "resume left something paused"
        world.moved_to_active(selected)
        reclaimed(world)
    else:
        world.repaired()
        world.moved_to_active(selected)
    expected = (len(selected), sum(a.reserved for a in selected), unknown_tags(tags))
    assert (report.allocations, report.bytes, report.unknown_tags) == expected, (report, expected)
