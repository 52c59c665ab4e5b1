"""The comparison of a World with the native core: the states, the sizes, every byte of resident memory, every byte with a
host backup, the files, the counters, and the simulated GPU's usage."""

from __future__ import annotations

import stat
import time
from typing import TYPE_CHECKING, Any

import model_runs as runs
from model_allocations import ACTIVE, DAMAGED, DEVICES, PAUSED, Allocation, pool_limit
from model_machine import GRANULARITY, first_difference, holds

from torch_memory_saver import _core

if TYPE_CHECKING:
    from model_world import World

RECLAIM_SECONDS = 60
#: The first fields of a row. The others are times.
_COMPARED = 9


def reclaim_late() -> None:
    """Makes the library retry the release of host memory, and waits for it: it happens on a thread of the library's. No work
    may wait on a device."""
    give_up = time.monotonic() + RECLAIM_SECONDS
    while _core.counters()["quarantined_host"]:
        assert time.monotonic() < give_up, "host memory is not taken back"
        _core.resume((), None)
        time.sleep(0)


def compare(world: World) -> None:
    """Compares everything with the core."""
    expected = sorted(allocation.row() for allocation in world.allocations)
    found = sorted(row[:_COMPARED] for row in _core.segments())
    assert found == expected, _differing(expected, found)
    for allocation in world.allocations:
        _check_contents(allocation, world.looks)
        _check_place(world, allocation)
        _check_guard(world, allocation)
    for view in world.views:
        if view.contents is not None:
            assert holds(view.address, view.contents), f"view: {first_difference(view.address, view.contents)}"
    _check_counters(world)
    _check_files(world)
    for actor in world.actors:
        level = actor.levels[-1] if actor.levels else actor.bottom
        current = actor.call(_core.region_current)
        expected_level = (level.tag, level.backup, level.managed, len(actor.levels), level.runs and runs.RUNS)
        assert current == expected_level, (actor, current)
        if world.clean:
            assert actor.call(lambda: _context_left(world)) is None, f"{actor.name}: a context of ours is current"
    for tag in world.tags:
        paused = sum(allocation.state != ACTIVE for allocation in world.allocations if allocation.tag == tag)
        assert _core.tag_info(tag).paused == paused, (tag, paused)


def _context_left(world: World) -> int | None:
    """The current context of this thread, which had none, after a call that has tried to restore that."""
    for device in range(DEVICES if world.machine.current_context() is not None else 0):
        _core.device_memory(device)  # enters the context of a device that is not current
    return world.machine.current_context()


def _check_contents(allocation: Allocation, looks: bool) -> None:
    """Every byte of one allocation and, with `looks`, of its host backup."""
    if allocation.state == ACTIVE:
        assert allocation.contents is not None
        assert holds(allocation.address, allocation.contents), (
            f"{allocation.described()}: {first_difference(allocation.address, allocation.contents)}"
        )
    if not looks:
        return
    whole = allocation.whole_copy if allocation.state != DAMAGED else None
    buffer = _core.host_backup(allocation.address, allocation.size)
    assert (buffer is None) == (whole is None), f"{allocation.described()}: {'no' if buffer is None else 'a'} whole backup"
    if allocation.state == DAMAGED or allocation.copy is None:
        return
    for begin, end in allocation.kept:
        part = _core.host_backup(allocation.address + begin, end - begin)
        assert part is not None, f"{allocation.described()}: has no backup of {begin} to {end}"
        expected = allocation.copy[begin:end]
        assert holds(part.address, expected), (
            f"backup of {begin} to {end} of {allocation.described()}: {first_difference(part.address, expected)}"
        )


def _check_place(world: World, allocation: Allocation) -> None:
    """No memory is moved behind the program's back."""
    if allocation.state == ACTIVE:
        assert world.machine.mapping(allocation.address) == allocation.run, allocation.described()
        assert world.machine.reservation(allocation.address) == allocation.range, allocation.described()


def _check_guard(world: World, allocation: Allocation) -> None:
    guarded = allocation.state == PAUSED and world.is_guarded(allocation)
    assert allocation.state != PAUSED or allocation.guarded in (guarded, None), (allocation.described(), guarded)
    allocation.guarded = guarded
    expected = bytes([_core.GUARD_BYTE]) * allocation.reserved
    assert not guarded or holds(allocation.address, expected), f"{allocation.described()}: shows other bytes than 0xFF"


def _differing(expected: list[Any], found: list[Any]) -> str:
    lines = [f"  the core has {row}" for row in found if row not in expected]
    return "\n".join(["allocations differ:", *lines, *(f"  should be   {row}" for row in expected if row not in found)])


def _check_counters(world: World) -> None:
    counters = _core.counters()
    existing = [*world.allocations, *world.deferred]
    host = sum(a.buffer for a in existing)
    detached = {view.address: view.buffer_bytes for view in world.views if view.owner is None}
    expected = {
        "allocations": len(world.allocations),
        "allocations_total": world.counted[0] + world.made,
        "frees_total": world.counted[1] + world.given_back,
        "paused_bytes": sum(a.reserved for a in world.with_state(PAUSED)),
        "damaged": len(world.with_state(DAMAGED)),
        "visible_captures": len(world.captures),
        "guard": world.guard,
    }
    if world.clean:
        expected |= {
            "host_backup_bytes": host + sum(detached.values()),
            "disk_backup_bytes": sum(a.size for a in existing if a.file),
            "shared_backup_bytes": 0,
            "slack_bytes": runs.slack(world),
            "resident_bytes": sum(a.reserved for a in world.with_state(ACTIVE)),
            "deferred_frees": len(world.deferred),
            "guarded_bytes": sum(a.reserved for device in range(DEVICES) for a in world.guarded_on(device)),
            "quarantined_handles": 0,
            "quarantined_ranges": 0,
        }
    if not world.with_state(PAUSED) and not world.deferred:
        world.guard_failures = counters["guard_failures_total"]
    # A guard page that could not be made accessible, nor be unmapped again, is counted and cannot be seen.
    half_guarded = counters["guard_failures_total"] != world.guard_failures
    if half_guarded:
        expected.pop("guarded_bytes", None)
    # During a capture it is deferred: a thread of the library's may have met a failure after the last call before that.
    while world.clean and not world.captures and counters["quarantined_host"]:
        reclaim_late()
        counters = _core.counters()
    # The staging memory of disk copies has events, which are deferred with it.
    if world.clean and not counters["quarantined_host"]:
        expected["quarantined_other"] = 0
    wrong = {name: (counters[name], value) for name, value in expected.items() if counters[name] != value}
    assert not wrong, f"counters (is, should be): {wrong}"
    assert counters["host_pooled_bytes"] <= max(pool_limit, world.reserved), counters
    if not world.clean or half_guarded:
        return
    assert counters["host_resident_bytes"] >= expected["host_backup_bytes"] + counters["host_pooled_bytes"], counters
    for row in _core.usage(None):
        device = None if row.device < 0 else row.device
        expected_slack = runs.slack(world, device, row.tag)
        assert row.slack_bytes == expected_slack, (row, expected_slack)
        waiting = [a for a in world.deferred if device in (None, a.device) and row.tag in (None, a.tag)]
        assert row.deferred_bytes == sum(a.reserved for a in waiting if a.state == ACTIVE), (row, waiting)
    for device, before in enumerate(world.before):
        usage = world.machine.usage(device)
        guarded = world.guarded_on(device)
        pages = 1 if guarded else 0  # each mapped once to be filled
        handles = [run for run, members in runs.runs_of(runs.with_memory(world)).items() if members[0].device == device]
        sums = {
            "physical_bytes": sum(run.bytes for run in handles) + pages * GRANULARITY,
            "handles": len(handles) + pages,
            "mappings": len(handles) + pages + sum(a.reserved for a in guarded) // GRANULARITY,
            "reservations": len({one.range for one in [*world.allocations, *world.deferred]})
            + sum(map(bool, map(world.guarded_on, range(DEVICES)))),
            "streams": 0,
        }
        wrong = {
            name: (getattr(usage, name) - getattr(before, name), value)
            for name, value in sums.items()
            if getattr(usage, name) - getattr(before, name) != value
        }
        assert not wrong, f"the simulated GPU has (is, should be): {wrong} on device {device}"


def _check_files(world: World) -> None:
    sizes = []
    for path in world.files():
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600, path
        sizes.append(status.st_size)
    needed = sorted(a.size for a in [*world.allocations, *world.deferred] if a.file)
    assert sorted(sizes) == needed or not world.clean, f"backup files of {sorted(sizes)} bytes, should be {needed}"
