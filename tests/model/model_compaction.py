"""Compaction of the model, and its possible effects when a call of the driver fails: part of the operations."""

from __future__ import annotations

from typing import Any

import model_runs as runs
from model_allocations import ACTIVE, DAMAGED, PAUSED, Allocation, PauseChoice, ResumeChoice
from model_pausing import choose_tags, reclaimed, renewed_in_vain, something_waits, spelled, unknown_tags
from model_settings import Operation
from model_world import FAILURES, World, describe_error

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver


def compact(world: World, choose: Any) -> bool:
    """The allocations that share a run with slack come back without it. All others stay where they are."""
    actor, tags = choose.pick(world.actors), choose_tags(world, choose)
    asked = spelled(world, tags, choose)
    had = bool(world.allocations) or something_waits()
    candidates = world.selected(tags, ACTIVE)
    call = f"{actor.name}: compact({asked})"
    try:
        report = world.act(actor, lambda: saver.compact(asked))
    except errors.CaptureInProgressError:
        world.say(f"{call} -> a capture is in progress")
        assert world.captures
        assert had or something_waits()
        return True
    except FAILURES as error:
        world.say(f"{call} -> {describe_error(error)}")
        assert world.rule, error
        runs.memory_was_short(world, error, exact=False)
        after_compaction(world, candidates)
        world.observe_states({DAMAGED: (PAUSED,)})
        return True
    world.say(f"{call} -> {report}")
    assert not (world.captures and (world.allocations or something_waits(host=False))), "compacted during a capture"
    if world.rule is None:
        world.repaired()
    selected = [one for one in candidates if runs.has_slack(world, one)]
    slack = sum(runs.slack_in(run, members) for run, members in runs.runs_of(selected).items())
    moved = after_compaction(world, candidates)
    if world.rule is not None:
        reclaimed(world)
    sizes = sum(allocation.size for allocation in moved)
    found = (report.allocations, report.copied_bytes, report.unknown_tags)
    assert found == (len(moved), sizes, unknown_tags(tags)), (report, moved)
    if world.clean:
        assert (moved, report.bytes) == (selected, slack), (report, moved, selected, slack)
    return True


def after_compaction(world: World, candidates: list[Allocation]) -> list[Allocation]:
    """Takes over what has become of each: it has not been touched, has come back, or has stayed paused after a failure.
    Contents are safe. Returns those that have come back."""
    states = {row.address: row.state for row in _core.segments()}
    world.pausing, world.resuming = PauseChoice(backup=_core.BACKUP_PINNED), ResumeChoice(guard=world.guard)
    moved = []
    for allocation in candidates:
        state = states[allocation.address]
        if state == ACTIVE and world.machine.mapping(allocation.address) == allocation.run:
            renewed_in_vain(world, allocation)
            continue
        assert state in (ACTIVE, PAUSED, DAMAGED), allocation.described()
        world.saved(allocation, PAUSED if state == ACTIVE else state)
        allocation.run, allocation.all_cached = None, False
        if state == ACTIVE:
            moved.append(allocation)
        else:
            allocation.guarded = None
    sources = [allocation.source for allocation in moved]
    world.moved_to_active(moved)
    for allocation, source in zip(moved, sources, strict=True):
        allocation.source = source  # it writes nothing new
    return moved


#: Each with its frequency in the long runs.
COMPACTING: dict[Operation, int] = {compact: 10}
