"""Guards what an out-of-memory report says, as data and as text."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver.observe import events
from torch_memory_saver.observe._out_of_memory import content
from torch_memory_saver.observe._out_of_memory.account import Account, take_account
from torch_memory_saver.observe._out_of_memory.content import MAX_EVENTS, collect
from torch_memory_saver.observe._out_of_memory.failure import PYTORCH, Failure, failure_of_torch
from torch_memory_saver.observe._out_of_memory.text import format_report
from torch_memory_saver.observe.events.event_file import load_events
from torch_memory_saver.observe.events.log import Event, EventLog, Level
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
FAILURE = Failure(PYTORCH, "allocate", 0, 600 * MIB, 600 * MIB, ())


@pytest.fixture
def report(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> tuple[dict[str, Any], Account]:
    """Of a process with 4 MiB paused, with a backup, and 8 MiB of PyTorch's."""
    with saver.region("a", enable_cpu_backup=True):
        fake_torch.allocate(4 * MIB)
    fake_torch.allocate(8 * MIB)
    saver.pause("a")
    account = take_account(0)
    return collect(FAILURE, account, 7), account


def test_a_report_is_json_and_complete(report: tuple[dict[str, Any], Account]) -> None:
    data, _ = report
    assert json.loads(json.dumps(data)) == data | {"failure": data["failure"] | {"tags": []}}
    assert (data["format"], data["version"], data["number"]) == ("torch_memory_saver.out_of_memory", 1, 7)
    assert data["missing"] == {}
    assert data["process"]["pid"] == os.getpid()
    assert data["tags"] == [
        {
            "tag": "a",
            "device": 0,
            "allocations": 1,
            "resident_bytes": 0,
            "slack_bytes": 0,
            "deferred_bytes": 0,
            "paused_bytes": 4 * MIB,
            "backup_bytes": 4 * MIB,
            "damaged_bytes": 0,
        }
    ]
    assert data["torch"]["allocated_bytes"] == 12 * MIB


def test_its_events_are_an_event_file(report: tuple[dict[str, Any], Account], tmp_path: Any) -> None:
    (tmp_path / "events.json").write_text(json.dumps(report[0]["events"]))
    log = load_events(tmp_path / "events.json")
    assert (log.events[-1].kind, log.events[-1].operation) == ("end", "pause")
    assert log.after == events.events().after


def test_the_latest_events_have_true_levels() -> None:
    """What was held before the first of those that are kept, not before the first of all."""
    many = [Event("allocate", tag="a", device=0, resident_change=MIB) for _ in range(MAX_EVENTS + 5)]
    after = (Level("a", 0, resident_bytes=len(many) * MIB),)
    log = EventLog(tuple(many), (), after, 3, 9999, 0, 0, 1, None, "", "", "")
    latest = content._latest(log)
    assert len(latest.events) == MAX_EVENTS
    assert latest.before == (Level("a", 0, resident_bytes=5 * MIB),)
    assert latest.dropped == 8
    assert content._latest(dataclasses.replace(log, events=(), after=())).before == ()


def test_only_settings_that_matter_are_named(
    report: tuple[dict[str, Any], Account], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("TMS_GUARD", "0")
    found = content._settings(FAILURE)["environment"]
    assert (found["PYTORCH_ALLOC_CONF"], found["TMS_GUARD"]) == ("backend:native", "0")
    assert "secret" not in found.values()


def test_the_tag_of_the_region_is_that_of_an_allocation(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert failure_of_torch(0, MIB, MIB).tags == ()
    with saver.region("inside"):
        assert failure_of_torch(0, MIB, MIB).tags == ("inside",)
        with saver.disable():
            assert failure_of_torch(0, MIB, MIB).tags == ()


def test_the_text_has_a_section_for_each_part(report: tuple[dict[str, Any], Account]) -> None:
    data, account = report
    text = format_report(data, account.ledger)
    paragraphs = text.rstrip("\n").split("\n\n")
    assert paragraphs[0].startswith("Out of memory on device 0, 20")
    assert paragraphs[0].endswith(" UTC, report 7 of this process")
    assert paragraphs[1].replace("\n", " ") == data["summary"]
    assert [paragraph.splitlines()[0] for paragraph in paragraphs[2:]] == [
        "What failed",
        "Who holds the device's memory",
        "Managed memory (MiB)",
        "PyTorch's counters (MiB)",
        "Call stacks that hold most",
        "Latest events",
        "Settings",
    ]
    assert "                   resident  slack  paused  backup  damaged\n" in text
    assert "  tag a, device 0       0.0    0.0     4.0     4.0      0.0\n" in text
    assert "  requested      600.0 MiB (629145600 bytes)\n" in text
    assert ", which empty_cache() releases, but not of pools in use\n" in text
    assert "  pause " in text.split("Latest events")[1]
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_text_of_a_report_without_anything() -> None:
    empty = dict.fromkeys(("process", "device", "ledger", "tags", "torch", "settings", "events", "stacks", "summary"))
    failure = dataclasses.asdict(dataclasses.replace(FAILURE, device=None, message="resume: too little memory"))
    data = empty | {"number": 1, "time": "2026-11-25T03:39:36.385+00:00", "failure": failure, "missing": {"tags": "why"}}
    assert format_report(data, None).splitlines() == [
        "Out of memory, 2026-11-25 03:39:36.385 UTC, report 1 of this process",
        "",
        "What failed",
        "  operation      allocate, by PyTorch",
        "  requested      600.0 MiB (629145600 bytes)",
        "  message        resume: too little memory",
        "",
        "Missing in this report",
        "  tags: why",
    ]


def test_frames_of_the_program_come_before_those_of_pytorch(report: tuple[dict[str, Any], Account]) -> None:
    data, account = report
    frames = ["/lib/torch/nn/functional.py:3 linear", *(f"train.py:{line} step" for line in range(9))]
    data["stacks"] = {
        "note": "",
        "rows": [
            {"bytes": 3 * MIB, "blocks": 2, "frames": frames, "origin": "Python frames"},
            {"bytes": MIB, "blocks": 1, "frames": [], "origin": "allocated before recording"},
        ],
    }
    text = format_report(data, account.ledger)
    assert "  3.0 MiB in 2 blocks\n    train.py:0 step\n" in text
    assert "    train.py:5 step\n    ... 3 more\n  1.0 MiB in 1 block\n    allocated before recording\n" in text
