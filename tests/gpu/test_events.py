"""Guards events on a GPU: a trace of torch.profiler and ours in one file, and the free memory that pauses sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_support import MIB, fill_random, saver, torch
from trace_rules import check_trace

from torch_memory_saver.observe import events
from torch_memory_saver.observe.events.timeline.merge import hosts_of

SIZE = 64 * MIB


@pytest.fixture
def sampled() -> Iterator[None]:
    events.sample_free_memory()
    yield
    events.sample_free_memory(False)


def cycle() -> None:
    """A pause and a resume with contents, each inside a range of the profiler."""
    with saver.region(tag="traced", enable_cpu_backup=True):
        kept = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    fill_random(kept, 1)
    with torch.profiler.record_function("around the pause"):
        saver.pause("traced")
    with torch.profiler.record_function("around the resume"):
        saver.resume("traced")
    del kept


def test_a_pause_lies_inside_the_range_around_it(tmp_path: Path) -> None:
    cycle()  # what is done once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cycle()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    path = events.write_chrome_trace(tmp_path / "both.json", merge=tmp_path / "profile.json")
    trace = json.loads(path.read_text())
    check_trace(trace, "torch_memory_saver")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]

    def latest(name: str) -> Any:
        return max((span for span in spans if span["name"] == name), key=lambda span: span["ts"])

    for operation in ("pause", "resume"):
        outer, inner = latest(f"around the {operation}"), latest(operation)
        assert (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"]), "on the same track"
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        copy = latest(f"{operation}: copy")
        assert inner["ts"] <= copy["ts"] and copy["ts"] + copy["dur"] <= inner["ts"] + inner["dur"]
        assert copy["args"]["bytes"] == SIZE


@pytest.mark.usefixtures("sampled")
def test_a_pause_samples_the_free_memory() -> None:
    cycle()
    log = events.events()
    call = max(event.call for event in log.events if event.kind == "end" and event.operation == "pause")
    device = torch.cuda.current_device()
    before, after = (event for event in log.events if event.kind == "memory" and event.call == call)
    (moved,) = (event for event in log.events if event.kind == "move" and event.call == call)
    assert (before.device, after.device, moved.device, moved.tag) == (device, device, device, "traced")
    assert before.total_bytes == after.total_bytes == torch.cuda.mem_get_info()[1]
    assert moved.paused_change == -moved.resident_change >= SIZE
    assert moved.backup_change == SIZE


def test_a_log_names_its_device_as_pytorch_does() -> None:
    cycle()
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    (one,) = (each for each in events.events().devices if each.device == device)
    assert one.total_bytes == properties.total_memory
    assert one.uuid == f"GPU-{properties.uuid}"


@pytest.mark.usefixtures("sampled")
def test_a_timeline_shows_all_that_is_used() -> None:
    """At each sample the managed and the other memory add up to what the driver says."""
    cycle()
    log = events.events()
    device = torch.cuda.current_device()
    (gpu,) = (each for each in hosts_of([log])[0].gpus if device in each.ordinals.values())
    samples = {event.ended_ns: event for event in log.events if event.kind == "memory" and event.device == device}
    levels = [0] * len(gpu.bands)
    seen = 0
    for time_ns, band, size in gpu.rows:
        levels[band] = size
        if gpu.bands[band].kind == "other" and time_ns in samples:
            drawn = sum(level for level, one in zip(levels, gpu.bands, strict=True) if one.kind in ("resident", "other"))
            assert drawn == samples[time_ns].total_bytes - samples[time_ns].bytes
            seen += 1
    assert seen == len(samples) >= 4


@pytest.mark.multigpu
def test_each_device_has_its_own_phases() -> None:
    with saver.region(tag="two", enable_cpu_backup=True):
        tensors = [torch.ones((1 + device) * SIZE, dtype=torch.uint8, device=device) for device in (0, 1)]
    saver.pause("two")
    saver.resume("two")
    log = events.events()
    call = max(event.call for event in log.events if event.kind == "end")
    for phase in ("create", "map", "copy"):
        mine = {event.device: event for event in log.events if event.call == call and event.phase == phase}
        assert set(mine) == {0, 1}
        assert all(mine[device].bytes >= (1 + device) * SIZE for device in mine)
    held = {level.device: level.resident_bytes for level in log.after if level.tag == "two"}
    assert set(held) == {0, 1}
    assert all(bool((tensor == 1).all()) for tensor in tensors)
