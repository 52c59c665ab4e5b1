"""Guards what a timeline reads from a log: levels that are those of stats(), also of a ring that has wrapped, and calls."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from recorded_logs import GIB, MIB, Process

from torch_memory_saver.observe.events import Event, EventLog, load_events
from torch_memory_saver.observe.events.timeline.levels import (
    Change,
    calls_of,
    changes_of,
    failures_of,
    samples_of,
)
from torch_memory_saver.observe.events.timeline.merge import hosts_of

#: Writes what stats() says beside the event file, while the process lives.
_TELL = """
import json
from torch_memory_saver.observe import events
def tell():
    log = events.write_events(os.environ["FOLDER"] + f"/{os.getpid()}.json")
    usage = torch_memory_saver.stats().tags
    tags = {tag: [one.resident_bytes, one.paused_bytes, one.backup_bytes] for tag, one in usage.items()}
    with open(os.environ["FOLDER"] + f"/{os.getpid()}.stats", "w") as file:
        json.dump(tags, file)
module.torch_memory_saver.hook_mode = "preload"
"""


def last_levels(log: EventLog) -> dict[str, list[int]]:
    """What each tag holds at the end, of each kind, on all devices."""
    held: dict[tuple[str, int, str], int] = {}
    for change in changes_of(log):
        held[change.tag, change.device, change.kind] = change.bytes
    return {
        tag: [
            sum(size for key, size in held.items() if (key[0], key[2]) == (tag, kind))
            for kind in ("resident", "paused", "backup")
        ]
        for tag in {key[0] for key in held}
    }


def told(folder: Path) -> list[tuple[EventLog, dict[str, list[int]]]]:
    return [
        (load_events(path.with_suffix(".json")), json.loads(path.read_text())) for path in sorted(folder.glob("*.stats"))
    ]


@pytest.mark.slow
def test_levels_of_a_wrapped_ring_end_at_stats(program: Any, tmp_path: Path) -> None:
    text = """
with module.region(tag="weights", enable_cpu_backup=True):
    weights = cuda_malloc(6 * MIB)
with module.region(tag="kv"):
    kv = [cuda_malloc(4 * MIB) for _ in range(3)]
with module.region(tag="weights"):
    for _ in range(8100):
        cuda_free(cuda_malloc(2 * MIB))
for _ in range(30):
    module.pause(); module.resume("weights"); module.pause("weights"); module.resume()
cuda_free(kv[0])
module.pause("weights")
tell()
"""
    program(_TELL + text, FOLDER=str(tmp_path))
    ((log, stats),) = told(tmp_path)
    assert log.dropped > 100 and len(log.events) == 16384
    assert stats == {"weights": [0, 6 * MIB, 6 * MIB], "kv": [8 * MIB, 0, 0]}
    assert last_levels(log) == stats
    first = [change for change in changes_of(log) if change.time_ns == log.begin_ns]
    assert sum(change.bytes for change in first if change.tag == "kv" and change.kind != "backup") == 12 * MIB


def test_two_processes_on_one_gpu_add_up_to_their_stats(program: Any, tmp_path: Path) -> None:
    text = """
import subprocess
mine = 2 if len(sys.argv) > 1 else 3
with module.region(tag="weights", enable_cpu_backup=True):
    cuda_malloc(2 * mine * MIB)
with module.region(tag="kv"):
    cuda_malloc(20 * mine * MIB)
module.pause("weights")
tell()
if len(sys.argv) == 1:
    child = [sys.executable, "-c", sys.orig_argv[2], "child"]
    assert subprocess.run(child).returncode == 0
"""
    program(_TELL + text, FOLDER=str(tmp_path))
    both = told(tmp_path)
    (host,) = hosts_of(log for log, _ in both)
    (gpu,) = host.gpus
    assert len(both) == len(gpu.ordinals) == 2
    assert gpu.uuid.startswith("GPU-") and gpu.total_bytes > 0
    levels = [0] * len(gpu.bands)
    for _, band, size in gpu.rows:
        levels[band] = size
    for place, kind in enumerate(("resident", "paused", "backup")):
        drawn = sum(size for size, band in zip(levels, gpu.bands, strict=True) if band.kind == kind)
        assert drawn == sum(sizes[place] for _, stats in both for sizes in stats.values())
    assert sum(size for size, band in zip(levels, gpu.bands, strict=True) if band.kind == "resident") == 100 * MIB


def test_nothing_is_held_after_the_exit() -> None:
    process = Process(1)
    process.allocate(10, "kv", 4 * MIB)
    process.pause(20, "kv", 4 * MIB, backup=2 * MIB)
    assert list(changes_of(process.log(500))) == [
        Change(10, 0, "kv", "resident", 4 * MIB),
        Change(120, 0, "kv", "resident", 0),
        Change(120, 0, "kv", "paused", 4 * MIB),
        Change(120, 0, "kv", "backup", 2 * MIB),
    ]
    assert list(changes_of(process.log(500, exited=True)))[4:] == [
        Change(500, 0, "kv", "paused", 0),
        Change(500, 0, "kv", "backup", 0),
    ]


def test_times_do_not_go_back() -> None:
    """Threads may record in another order than that of their clocks."""
    process = Process(1)
    process.allocate(10, "kv", 4 * MIB)
    process.allocate(30, "kv", 4 * MIB)
    process.allocate(20, "kv", 4 * MIB)
    assert [change.time_ns for change in changes_of(process.log(50))] == [10, 30, 30]


def test_a_wrapped_ring_begins_when_its_first_event_was_recorded() -> None:
    """The end of a pause began before its move, which was dropped: until then the memory was resident."""
    process = Process(1)
    process.allocate(10, "kv", 4 * MIB)
    process.pause(1000, "kv", 4 * MIB, ns=100)
    log = process.log(2000, capacity=1)
    assert (log.events[0].kind, log.events[0].began_ns, log.dropped) == ("end", 1000, 5)
    assert list(changes_of(log)) == [Change(1100, 0, "kv", "paused", 4 * MIB)]


def test_calls_have_their_phases_and_tags() -> None:
    process = Process(1)
    process.pause(1000, "kv", 4 * MIB, backup=MIB, ns=100)
    process.begin(2000, "resume")
    pause, resume = calls_of(process.log(2500))
    assert (pause.operation, pause.began_ns, pause.ended_ns, pause.finished) == ("pause", 1000, 1100, True)
    assert (pause.allocations, pause.bytes, pause.copied_bytes, pause.status, pause.tags) == (
        1,
        4 * MIB,
        MIB,
        "OK",
        (("kv", 0),),
    )
    assert [(phase.name, phase.device, phase.began_ns, phase.ended_ns) for phase in pause.phases] == [
        ("turn", -1, 1000, 1010),
        ("copy", 0, 1010, 1050),
    ]
    assert (resume.operation, resume.began_ns, resume.ended_ns, resume.finished) == ("resume", 2000, 2500, False)


def test_a_call_whose_begin_was_dropped_still_has_its_own() -> None:
    process = Process(1)
    process.pause(1000, "kv", 4 * MIB, ns=100)
    (whole,) = calls_of(process.log(2500, capacity=1))
    assert (whole.began_ns, whole.ended_ns, whole.phases) == (1000, 1100, ())
    process.events.pop()
    (part,) = calls_of(process.log(2500, capacity=2))
    assert (part.operation, part.began_ns, part.finished) == ("pause", 1010, False)


def test_failures_and_samples() -> None:
    process = Process(1)
    process.fail(10, "kv", GIB)
    process.sample(20, 3 * GIB)
    broken = dataclasses.replace(process.events[-1], status="DRIVER")
    process.events.append(broken)
    process.events.append(Event("repair", began_ns=30, ended_ns=30, device=0, status="OK"))
    log = process.log(40)
    ((at, device, what, tag, size, status, result),) = failures_of(log)
    assert (at, device, what, tag, size, status, result) == (10, 0, "allocate", "kv", GIB, "OUT_OF_DEVICE_MEMORY", 2)
    assert samples_of(log) == [(20, 0, 3 * GIB, 8 * GIB)]
