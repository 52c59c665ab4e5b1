"""Guards events(): what a pause and a resume tell, levels that lead from `before` to `after`, and reading meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events import Device, Event, EventLog, Level
from torch_memory_saver.observe.events import log as log_module
from torch_memory_saver.observe.events.log import add_up, levels_before
from torch_memory_saver.reports.usage import take_stats

MIB = 1 << 20


def allocate(tag: str, size: int, device: int = 0, backup: int = _core.BACKUP_NONE) -> int:
    with core_region(tag, backup, True):
        return _core.allocate(size, device)


def newest(log: EventLog, earlier: EventLog) -> list[Event]:
    count = log.dropped + len(log.events) - earlier.dropped - len(earlier.events)
    return list(log.events[len(log.events) - count :])


def test_a_pause_and_a_resume_tell_what_they_did(simulator: Any) -> None:
    address = allocate("log", 3 * MIB, 1, _core.BACKUP_PINNED)
    before = events.events()
    _core.pause(("log",), None)
    _core.resume(("log",), None)
    _core.free(address)
    log = events.events()
    told = [(event.operation, event.phase or event.kind, event.device) for event in newest(log, before)]
    assert told == [
        ("pause", "begin", -1),
        ("pause", "turn", -1),
        ("pause", "synchronize", -1),
        ("pause", "plan", -1),
        ("pause", "copy", 1),
        ("pause", "unmap", -1),
        ("pause", "move", 1),
        ("pause", "end", -1),
        ("resume", "begin", -1),
        ("resume", "turn", -1),
        ("resume", "copy", 1),
        ("resume", "create", 1),
        ("resume", "map", 1),
        ("resume", "discard", -1),
        ("resume", "move", 1),
        ("resume", "end", -1),
        ("", "free", 1),
    ]
    end = newest(log, before)[7]
    assert (end.allocations, end.bytes, end.copied_bytes, end.status) == (1, 4 * MIB, 3 * MIB, "OK")
    assert end.began_ns <= end.ended_ns <= log.taken_ns
    assert abs(log.taken_ns + log.wall_offset_ns - time.time_ns()) < 3600 * 10**9, "nanoseconds since 1970"
    assert (log.pid, log.capacity) == (os.getpid(), 16384)
    assert log.boot_id and log.host and log.role


def test_the_latest_events_are_printed_as_a_table() -> None:
    rows = (
        Event("phase", "resume", "copy", 1_000_000, 3_500_000, device=0, bytes=4 * MIB),
        Event("move", "pause", ended_ns=5_000_000, began_ns=5_000_000, device=1, tag="a\nb", resident_change=-2 * MIB),
        Event("end", "resume", "", 1_000_000, 6_000_000, status="OUT_OF_DEVICE_MEMORY"),
    )
    log = EventLog((Event("free"),) * 30 + rows, (), (), 0, 64, 1_000_000_000, 0, 7, None, "train.py", "host", "")
    lines = str(log).splitlines()
    assert lines[:2] == [
        "33 events of train.py (process 7), the latest 20:",
        "event                             tag  device   MiB     ms  seconds ago",
    ]
    assert len(lines) == 22 and lines[-3:] == [
        "resume copy                                 0   4.0  2.500        0.997",
        "pause move                        a?b       1  -2.0               0.995",
        "resume end: OUT_OF_DEVICE_MEMORY                     5.000        0.994",
    ]
    assert repr(log).startswith("EventLog(events=(Event(kind='free', "), "for programs"


def test_levels_lead_from_before_to_after_and_are_those_of_the_statistics(simulator: Any) -> None:
    addresses = [allocate(f"levels {i % 3}", (1 + i) * MIB, i % 2) for i in range(7)]
    _core.pause(("levels 1",), None)
    log = events.events()
    levels = {(level.device, level.tag): level for _, level in log.levels()}
    held = {(level.device, level.tag): level for level in log.after}
    assert {key: level for key, level in levels.items() if level != Level(level.tag, level.device)} == held
    for tag, usage in take_stats().tags.items():
        mine = [level for level in log.after if level.tag == tag]
        assert sum(level.resident_bytes for level in mine) == usage.resident_bytes
        assert sum(level.paused_bytes for level in mine) == usage.paused_bytes
        assert sum(level.backup_bytes for level in mine) == usage.backup_bytes
    times = [at for at, _ in log.levels()]
    assert times == sorted(times)
    for address in addresses:
        _core.free(address)


def test_the_devices_of_a_log(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_devices", {})
    address = allocate("device", MIB, 1)
    simulator.fail_after("cuDeviceGetUuid_v2", 0, 1, 801)
    first = {one.device: one for one in events.events().devices}
    devices = {one.device: one for one in events.events().devices}
    assert Device(min(first)) == first[min(first)], "the driver did not say"
    assert (devices[1].uuid, devices[1].total_bytes) == (_core.device_info(1).uuid, simulator.device_memory)
    assert sorted(devices) == sorted({event.device for event in events.events().events if event.device >= 0})
    _core.free(address)


def test_levels_before_undo_the_changes() -> None:
    after = (Level("kv", 0, 6, 0, 0), Level("weights", 0, 0, 8, 8))
    told = [
        Event("allocate", tag="kv", device=0, resident_change=6),
        Event("end"),
        Event("move", tag="weights", device=0, resident_change=-8, paused_change=8, backup_change=8),
        Event("free", tag="gone", device=1, resident_change=-2),
    ]
    assert levels_before(after, told) == (Level("weights", 0, 8), Level("gone", 1, 2))
    assert add_up([Level("a", 0, 1), Level("a", 0, 2, 3), Level("a", 1, 1), Level("b", 0)]) == (
        Level("a", 0, 3, 3),
        Level("a", 1, 1),
    )


def test_failures_name_their_status_and_result(simulator: Any) -> None:
    before = events.events()
    with pytest.raises(Exception, match="allocate"):
        allocate("too large", 1 << 40)
    (failed,) = newest(events.events(), before)
    assert (failed.kind, failed.tag, failed.bytes, failed.status) == (
        "allocate",
        "too large",
        1 << 40,
        "OUT_OF_DEVICE_MEMORY",
    )
    assert failed.resident_change == 0


def test_events_are_read_while_another_thread_pauses(simulator: Any) -> None:
    """The pause calls back in its middle; the reader on another thread sees its begin, and no end."""
    address = allocate("held", 2 * MIB, backup=_core.BACKUP_PINNED)
    before = events.events()
    seen: list[Event] = []

    def find_live() -> None:
        reader = threading.Thread(target=lambda: seen.extend(newest(events.events(), before)))
        reader.start()
        reader.join()

    _core.pause(("held",), None, find_live=find_live)
    assert [event.phase or event.kind for event in seen] == ["begin", "turn", "synchronize"]
    _core.free(address)


def test_a_forked_child_has_its_own_events(program: Any) -> None:
    text = """
from torch_memory_saver.observe import events
with module.region(tag="parent"):
    cuda_malloc(2 * MIB)
assert len(events.events().events) == 1
pid = os.fork()
if pid == 0:
    status = 1
    try:
        log = events.events()
        assert (log.events, log.after, log.dropped, log.pid) == ((), (), 0, os.getpid()), log
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
assert len(events.events().events) == 1
"""
    program(text)
