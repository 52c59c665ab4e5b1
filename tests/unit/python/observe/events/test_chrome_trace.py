"""Guards the Chrome trace: it keeps the rules of the format, its levels are true, and it merges with another one."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region
from trace_rules import check_trace

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events import Event, EventLog, Level
from torch_memory_saver.observe.events.chrome_trace import trace_events

MIB = 1 << 20
#: A time of the monotonic clock, and of a trace.
NOW = 5_000_000_000
BASE = 1_790_000_000_000_000_000

LOG = EventLog(
    events=(
        Event(
            "allocate", began_ns=NOW, ended_ns=NOW, thread=5, device=0, tag="kv", address=4096, bytes=9, resident_change=4
        ),
        Event("begin", "resume", began_ns=NOW + 10, ended_ns=NOW + 10, call=1, thread=5),
        Event("phase", "resume", "turn", NOW + 11, NOW + 12, call=1, thread=5),
        Event("phase", "resume", "create", NOW + 20, NOW + 60, 25, call=1, thread=6, device=1, bytes=4),
        Event("phase", "resume", "map", NOW + 30, NOW + 70, 25, call=1, thread=6, device=1, bytes=4),
        Event("phase", "resume", "copy", NOW + 25, NOW + 90, call=1, thread=6, device=1, bytes=4),
        Event(
            "move",
            "resume",
            "",
            NOW + 95,
            NOW + 95,
            call=1,
            thread=5,
            device=1,
            tag="w",
            resident_change=4,
            paused_change=-4,
        ),
        Event("end", "resume", "", NOW + 10, NOW + 100, call=1, thread=5, status="DRIVER", driver_result=999),
        Event("memory", "pause", "", NOW + 110, NOW + 110, call=2, thread=5, device=1, bytes=77, total_bytes=100),
        Event("begin", "pause", began_ns=NOW + 120, ended_ns=NOW + 120, call=2, thread=7),
    ),
    before=(Level("w", 1, 0, 4, 4),),
    after=(Level("kv", 0, 4), Level("w", 1, 4, 0, 4)),
    dropped=2,
    capacity=10,
    taken_ns=NOW + 200,
    wall_offset_ns=BASE - NOW,
    pid=42,
    rank=3,
    role="trainer",
    host="node",
    boot_id="b",
)


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def write(tmp_path: Path, **options: Any) -> dict[str, Any]:
    trace = json.loads(events.write_chrome_trace(tmp_path / "trace.json", **options).read_text())
    check_trace(trace, "torch_memory_saver" if options.get("merge") else None)
    return dict(trace)


def test_calls_phases_and_tracks(tmp_path: Path) -> None:
    trace = write(tmp_path, log=LOG)
    assert trace["baseTimeNanoseconds"] == BASE, "the first event"
    spans = {event["name"]: event for event in of_kind(trace, "X")}
    assert (spans["resume"]["ts"], spans["resume"]["dur"], spans["resume"]["tid"]) == (0.01, 0.09, 5)
    assert spans["resume"]["args"] == {"call": 1, "status": "DRIVER", "driver_result": 999}
    assert spans["resume: create"]["args"]["busy_us"] == 0.025
    assert spans["pause"]["args"]["unfinished"] is True
    assert spans["pause"]["ts"] + spans["pause"]["dur"] == pytest.approx(0.2)
    tracks = {spans[f"resume: {phase}"]["tid"] for phase in ("create", "map", "copy")}
    assert len(tracks) == 3 and min(tracks) > 1 << 22, "phases of a device overlap: each has a track of its own"
    names = {event["tid"]: event["args"]["name"] for event in of_kind(trace, "M")}
    assert names[0] == "trainer (rank 3)"
    assert names[spans["resume: map"]["tid"]] == "GPU 1: map"
    assert [event["name"] for event in of_kind(trace, "i")] == ["allocate"]
    assert {event["pid"] for event in trace["traceEvents"]} == {42}


def test_counters_show_the_levels(tmp_path: Path) -> None:
    counters = [(event["name"], event["ts"], event["args"]) for event in of_kind(write(tmp_path, log=LOG), "C")]
    assert counters == [
        ("GPU 1 paused bytes", 0.0, {"w": 4}),
        ("GPU 1 backup bytes", 0.0, {"w": 4}),
        ("GPU 0 resident bytes", 0.0, {"kv": 4}),
        ("GPU 1 resident bytes", 0.095, {"w": 4}),
        ("GPU 1 paused bytes", 0.095, {"w": 0}),
        ("GPU 1 free bytes", 0.11, {"free": 77}),
    ]


def test_a_real_log_keeps_the_rules(tmp_path: Path, simulator: Any) -> None:
    addresses = []
    for device in (0, 1):
        with core_region(f"trace {device}", _core.BACKUP_PINNED, True):
            addresses += [_core.allocate(size * MIB, device) for size in (1, 3, 5)]
    for _ in range(3):
        _core.pause(None, None)
        _core.resume(None, None)
    for address in addresses:
        _core.free(address)
    trace = write(tmp_path)
    log = events.events()
    spans = of_kind(trace, "X")
    assert len(spans) == sum(event.kind in ("end", "phase") for event in log.events)
    last = [event for event in of_kind(trace, "C") if event["name"] == "GPU 1 resident bytes"][-1]
    assert last["args"]["trace 1"] == 0


def test_times_refer_to_the_given_base(tmp_path: Path) -> None:
    trace = write(tmp_path, log=LOG, base_time_nanoseconds=BASE - 5000)
    assert trace["baseTimeNanoseconds"] == BASE - 5000
    assert next(event["ts"] for event in of_kind(trace, "X") if event["name"] == "resume") == pytest.approx(5.01)
    none = dataclasses.replace(LOG, events=(), before=(), after=())
    assert write(tmp_path, log=none)["baseTimeNanoseconds"] == BASE + 200


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_merged_with_a_trace_of_the_profiler(suffix: str, tmp_path: Path) -> None:
    outer = {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 42, "tid": 5, "ts": 1.0, "dur": 1.5, "args": {}}
    flow = {"ph": "f", "id": 7, "pid": 42, "tid": 5, "ts": 1.1, "cat": "ac2g", "name": "ac2g", "bp": "e"}
    text = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE - 2000, "traceEvents": [outer, flow]}).encode()
    profile = tmp_path / f"profile{suffix}"
    profile.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    trace = write(tmp_path, log=LOG, merge=profile)
    assert trace["schemaVersion"] == 1 and trace["baseTimeNanoseconds"] == BASE - 2000
    assert trace["traceEvents"][:2] == [outer, flow]
    resume = next(event for event in of_kind(trace, "X") if event["name"] == "resume")
    assert outer["ts"] < resume["ts"] and resume["ts"] + resume["dur"] < outer["ts"] + outer["dur"]
    assert not [event for event in of_kind(trace, "M") if event["name"] == "process_name"], "the profiler names it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "is not JSON"),
        (b"[]", "has no list traceEvents"),
        (b'{"traceEvents": []}', "has no baseTimeNanoseconds"),
    ],
)
def test_what_is_no_trace_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=f"write_chrome_trace: {path} {message}"):
        events.write_chrome_trace(tmp_path / "trace.json", merge=path)
    assert os.listdir(tmp_path) == ["profile.json"]


def test_only_one_base_time(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="give only one of the two"):
        events.write_chrome_trace(tmp_path / "trace.json", merge="x", base_time_nanoseconds=1)


def test_the_checker_sees_what_breaks_the_rules() -> None:
    """It is what the tests here rely on."""
    for change in (
        {"ph": "Q"},
        {"pid": "42"},
        {"tid": 1.5},
        {"ts": "0"},
        {"dur": -1.0},
        {"ph": "C", "args": {"x": "1"}},
        {"ph": "C", "args": {"x": -1}},
        {"ph": "i", "s": "x"},
        {"ph": "E"},
        {"ph": "B"},
        {"ph": "M", "name": "thread"},
    ):
        rows = trace_events(LOG, BASE)
        span = next(row for row in rows if row["ph"] == "X")
        rows.append(span | change)
        with pytest.raises((AssertionError, TypeError)):
            check_trace({"baseTimeNanoseconds": 1, "traceEvents": rows})
    rows = trace_events(LOG, BASE)
    rows.append(next(row for row in rows if row["name"] == "resume") | {"ts": 0.05, "dur": 0.1})
    with pytest.raises(AssertionError, match="ends after"):
        check_trace({"baseTimeNanoseconds": 1, "traceEvents": rows})
