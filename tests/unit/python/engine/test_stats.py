"""Guards stats(), snapshot() and tag_of(): what they count, what a selection changes, and what they print."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from typing import Any

import pytest
from fake_torch import FakeTorch
from recorded_hooks import Recorder

import torch_memory_saver as module
from torch_memory_saver import TorchMemorySaver, _core, errors
from torch_memory_saver.reports.usage import CallTotals

MIB = 1 << 20
CUDA_ERROR_UNKNOWN = 999


@pytest.fixture
def two_tags(saver: TorchMemorySaver, fake_torch: FakeTorch) -> TorchMemorySaver:
    """4 MiB of "a" on each of two devices, 2 MiB of "b" on the first. "a" is paused, with a backup."""
    fake_torch.devices = 2
    for device in range(2):
        with saver.region("a", enable_cpu_backup=True):
            fake_torch.allocate(4 * MIB, device)
    with saver.region("b"):
        fake_torch.allocate(2 * MIB, 0)
    saver.reset_peaks()
    saver.pause("a")
    return saver


def sizes(usage: module.reports.Usage) -> tuple[int, int, int]:
    return usage.allocations, usage.resident_bytes, usage.paused_bytes


def test_by_tag_and_by_device(two_tags: TorchMemorySaver) -> None:
    stats = two_tags.stats()
    assert {tag: sizes(usage) for tag, usage in stats.tags.items()} == {"a": (2, 0, 8 * MIB), "b": (1, 2 * MIB, 0)}
    assert {device: sizes(usage) for device, usage in stats.devices.items() if usage.allocations} == {
        0: (2, 2 * MIB, 4 * MIB),
        1: (1, 0, 4 * MIB),
    }
    assert sizes(stats.total) == (3, 2 * MIB, 8 * MIB)
    assert stats.total.backup_bytes == stats.tags["a"].backup_bytes >= 8 * MIB
    assert stats.tags["a"].resident_peak_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("selection", "total", "tags", "devices"),
    [
        ({"tag": "a"}, (2, 0, 8 * MIB), ["a"], [0, 1]),
        ({"tag": ["b", "a"]}, (3, 2 * MIB, 8 * MIB), ["b", "a"], [0, 1]),
        ({"tag": "[a-b]"}, (3, 2 * MIB, 8 * MIB), ["b", "a"], [0, 1]),
        ({"device": 1}, (1, 0, 4 * MIB), ["a"], [1]),
        ({"tag": "a", "device": 0}, (1, 0, 4 * MIB), ["a"], [0]),
        ({"tag": "b", "device": 1}, (0, 0, 0), [], []),
        ({"tag": "never"}, (0, 0, 0), [], []),
    ],
)
def test_selections(
    two_tags: TorchMemorySaver, selection: dict[str, Any], total: tuple[int, ...], tags: list[str], devices: list[int]
) -> None:
    stats = two_tags.stats(**selection)
    assert sizes(stats.total) == total
    assert sorted(stats.tags) == sorted(tags)
    assert [device for device, usage in stats.devices.items() if usage.allocations] == devices
    assert len(stats.allocations) == total[0]
    assert sum(row.reserved_bytes for row in stats.allocations) == sum(total[1:])


def test_a_selected_device_has_a_row(two_tags: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert two_tags.stats(device=7).devices == {7: module.reports.Usage()}
    assert str(two_tags.stats(device=7)).splitlines()[1].split()[:3] == ["device", "7", "0"]
    with pytest.raises(errors.InvalidArgumentError, match=r"^stats: device must be"):
        two_tags.stats(device="x")  # type: ignore[arg-type]


def test_peaks_are_of_what_has_one(two_tags: TorchMemorySaver) -> None:
    two_tags.reset_peaks()
    two_tags.resume("a")
    assert two_tags.stats().total.resident_peak_bytes == 10 * MIB
    assert two_tags.stats("a").total.resident_peak_bytes == 8 * MIB
    assert two_tags.stats(device=0).total.resident_peak_bytes == 6 * MIB
    both = two_tags.stats("a", device=0)
    assert (
        both.total.resident_peak_bytes is both.tags["a"].resident_peak_bytes is both.devices[0].resident_peak_bytes is None
    )
    assert two_tags.stats(["a", "b"]).total.resident_peak_bytes is None
    two_tags.pause("a")
    assert two_tags.stats().total.resident_peak_bytes == 10 * MIB
    two_tags.reset_peaks()
    assert two_tags.stats().total.resident_peak_bytes == 2 * MIB


def test_calls_so_far(two_tags: TorchMemorySaver) -> None:
    before = two_tags.stats()
    two_tags.resume("a")
    two_tags.pause("a")
    after = two_tags.stats()
    for earlier, later in ((before.pauses, after.pauses), (before.resumes, after.resumes)):
        assert later.calls == earlier.calls + 1
        assert later.bytes - earlier.bytes == later.copied_bytes - earlier.copied_bytes == 8 * MIB
        assert later.seconds > earlier.seconds
        assert later.failures == earlier.failures


def test_ages(two_tags: TorchMemorySaver) -> None:
    older, _, newer = two_tags.stats().allocations
    assert older.age > newer.age >= newer.state_age >= 0
    assert older.age > older.state_age  # it was paused later
    assert newer.age == pytest.approx(newer.state_age)  # and this one never


def test_statistics_as_data_are_json(two_tags: TorchMemorySaver) -> None:
    stats = two_tags.stats()
    snapshot = json.loads(json.dumps(stats.as_dict()))
    assert snapshot["pid"] == os.getpid() and snapshot["time"] <= time.time()
    assert [row["address"] for row in snapshot["allocations"]] == [row.address for row in stats.allocations]
    assert [(row["tag"], row["state"], row["backup"], row["device"]) for row in snapshot["allocations"]] == [
        ("a", "paused", "host", 0),
        ("a", "paused", "host", 1),
        ("b", "active", "none", 0),
    ]
    assert set(snapshot["allocations"][0]) == set(module.reports.Allocation.__dataclass_fields__)
    assert snapshot["tags"]["a"]["paused_bytes"] == 8 * MIB
    assert snapshot["devices"]["1"]["paused_bytes"] == 4 * MIB
    assert snapshot["counters"] == dict(stats.counters)


def test_a_change_of_the_data_does_not_change_the_statistics(two_tags: TorchMemorySaver) -> None:
    stats = two_tags.stats()
    data = stats.as_dict()
    for each in (data["total"], data["tags"]["a"], data["devices"]["0"], data["allocations"][0]):
        each["bytes"] = -1
    data["pauses"]["calls"] = -1
    assert min(stats.total.bytes, stats.tags["a"].bytes, stats.devices[0].bytes, stats.allocations[0].bytes) > 0
    assert stats.pauses.calls >= 0


def test_print_is_a_table(two_tags: TorchMemorySaver) -> None:
    two_tags.reset_peaks()
    lines = str(two_tags.stats()).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["MiB", "allocations", "resident", "peak", "paused", "backup"],
        ["tag", "a", "2", "0.0", "0.0", "8.0", "8.0"],
        ["tag", "b", "1", "2.0", "2.0", "0.0", "0.0"],
    ]
    assert len({len(line) for line in lines[:6]}) == 1, "the columns are aligned"
    assert lines[5].split()[:3] == ["total", "3", "2.0"]
    assert lines[6].startswith("pauses: ")
    unused = dataclasses.replace(two_tags.stats(), resumes=CallTotals())
    assert "\nresumes: 0\n" in f"{unused}\n"
    assert all(len(line) < 100 for line in lines)
    assert len(repr(two_tags.stats())) < 200


def test_what_is_worth_a_line(two_tags: TorchMemorySaver, simulator: Any) -> None:
    two_tags.guard = True
    try:
        two_tags.pause()
        text = str(two_tags.stats())
        assert "guard mode is on: 2 MiB read as 0xFF" in text
        assert "host memory for backups: " in text
    finally:
        two_tags.guard = False
    two_tags.resume()
    simulator.fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN)
    with pytest.raises(errors.DriverError):
        two_tags.pause("b")
    heading, *rows = str(two_tags.stats()).splitlines()
    assert heading.split()[-1] == "damaged"
    assert [row.split()[-1] for row in rows if row.startswith("tag b")] == ["2.0"]
    assert f"; {two_tags.stats().pauses.failures} failed" in "\n".join(rows)


def test_shared_objects_have_a_line(two_tags: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shared objects" not in str(two_tags.stats())
    counters = _core.counters() | {"shared_backup_bytes": 6 * MIB, "shared_made_bytes": 2 * MIB}
    with monkeypatch.context() as patch:
        patch.setattr(_core, "counters", lambda: counters)
        text = str(two_tags.stats())
    assert "shared objects: 6 MiB, 2 MiB of it written by this process" in text.splitlines()


def test_slack_has_a_column_where_there_is_any(hooks: Recorder) -> None:
    hooks.make_slack("w")
    hooks.allocate("other")
    heading, *rows = (line.split() for line in str(hooks.saver.stats()).splitlines())
    assert heading == ["MiB", "allocations", "resident", "peak", "paused", "backup", "slack"]
    assert [(row[1], row[3], row[-1]) for row in rows if row[0] == "tag"] == [
        (hooks.tag("w"), "14.0", "2.0"),
        (hooks.tag("other"), "2.0", "0.0"),
    ]
    snapshot = hooks.saver.stats().as_dict()
    assert snapshot["tags"][hooks.tag("w")]["slack_bytes"] == snapshot["counters"]["slack_bytes"] == 2 * MIB
    assert "slack" not in str(hooks.saver.stats(hooks.tag("other")))


def test_deferred_frees_have_a_column_where_there_are_any(hooks: Recorder) -> None:
    (address,) = hooks.allocate("w")
    hooks.allocate("other")
    identity = _core.capture_begin(None, _core.BACKUP_NONE)
    _core.free(address)
    hooks.addresses.remove(address)
    stats, text = hooks.saver.stats(), str(hooks.saver.stats())
    assert (stats.tags[hooks.tag("w")].deferred_bytes, stats.total.deferred_bytes) == (2 * MIB, 2 * MIB)
    assert (stats.devices[0].deferred_bytes, stats.counters["deferred_bytes"]) == (2 * MIB, 2 * MIB)
    assert text.splitlines()[0].split()[-1] == "deferred"
    _core.capture_end(identity)
    assert hooks.saver.stats().total.deferred_bytes == 0
    assert hooks.tag("w") not in hooks.saver.stats().tags
    assert "deferred" not in str(hooks.saver.stats())


def test_without_allocations(saver: TorchMemorySaver) -> None:
    stats = saver.stats()
    assert (stats.total.allocations, stats.tags, stats.allocations) == (0, {}, ())
    assert str(stats).splitlines()[0].split()[0] == "MiB"
    assert saver.stats().as_dict()["allocations"] == []


@pytest.mark.parametrize("wrong", [3, b"a", [1]])
def test_wrong_tags(saver: TorchMemorySaver, wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.stats(wrong)


def test_stats_during_a_pause_of_another_thread(two_tags: TorchMemorySaver) -> None:
    two_tags.resume("a")
    inside, looked = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        inside.set()
        looked.wait()

    thread = threading.Thread(target=lambda: two_tags.pause("a", progress=progress))
    thread.start()
    inside.wait()
    try:
        states = {row.tag: row.state for row in two_tags.stats().allocations}
    finally:
        looked.set()
        thread.join()
    assert states == {"a": "pausing", "b": "active"}
