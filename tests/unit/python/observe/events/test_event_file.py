"""Guards event files: what was written is read again, and what is no such file is one clear sentence."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events import Device, Event, EventLog, Level

LOG = EventLog(
    events=(
        Event("allocate", ended_ns=5, began_ns=5, tag='q"ö', device=0, bytes=7, address=1 << 40, resident_change=1 << 21),
        Event("end", "pause", began_ns=6, ended_ns=9, call=1, status="DRIVER", driver_result=999),
    ),
    before=(Level("kv", 1, 2, 3, 4),),
    after=(Level("kv", 1, 2, 3, 4), Level('q"ö', 0, 1 << 21)),
    dropped=3,
    capacity=4096,
    taken_ns=12,
    wall_offset_ns=-5,
    pid=77,
    rank=None,
    role="trainer",
    host="node",
    boot_id="0-1",
    devices=(Device(0, "GPU-0", 1 << 33), Device(1)),
    exited=True,
)


def test_a_log_comes_back_whole(tmp_path: Path) -> None:
    path = events.write_events(tmp_path / "new" / "events.json", log=LOG)
    assert events.load_events(path) == LOG
    ranked = dataclasses.replace(LOG, rank=3)
    assert events.load_events(events.write_events(path, log=ranked)) == ranked
    assert os.listdir(path.parent) == ["events.json"]


def test_the_header_is_plain(tmp_path: Path, simulator: Any) -> None:
    with core_region("file", _core.BACKUP_NONE, True):
        address = _core.allocate(1, 0)
    data = json.loads(events.write_events(tmp_path / "events.json").read_text())
    _core.free(address)
    assert (data["format"], data["version"], data["pid"]) == ("torch_memory_saver.events", 1, os.getpid())
    assert set(data) == {"format", "version"} | {field.name for field in dataclasses.fields(EventLog)}
    assert data["events"][-1]["tag"] == "file"
    assert {"tag": "file", "device": 0, "resident_bytes": 2 << 20, "paused_bytes": 0, "backup_bytes": 0} in data["after"]


@pytest.mark.parametrize("path", [".", ".."])
def test_a_folder_is_no_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises(IsADirectoryError, match="write_events: Is a directory: the events were not written"):
        events.write_events(path, log=LOG)
    assert not os.listdir(tmp_path / "inside")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'its key "format" is not "torch_memory_saver.events"'),
        ({"version": 2}, "its version is 2, and this package reads version 1: upgrade torch_memory_saver to read it"),
        ({"version": "1"}, "its version is '1', and this package reads version 1"),
        ({"events": [{"kind": "free", "bytes": True}]}, 'the "bytes" of an event is True'),
        ({"pid": "7"}, "its key \"pid\" is '7'"),
        ({"taken_ns": 1 << 64}, 'its key "taken_ns" is 18446744073709551616'),
        ({"events": [{"kind": "free", "bytes": 1 << 64}]}, 'the "bytes" of an event is 18446744073709551616'),
        ({"after": [{"tag": "kv", "device": -(1 << 70)}]}, 'the "device" of a level is -1180591620717411303424'),
        ({"rank": True}, 'its key "rank" is True'),
        ({"boot_id": None}, 'its key "boot_id" is None'),
        ({"exited": 1}, 'its key "exited" is 1'),
        ({"devices": {}}, 'its key "devices" is not a list'),
        ({"devices": [0]}, "0 is not a device"),
        ({"devices": [{"uuid": "GPU-0"}]}, 'the "device" of a device is None'),
        ({"events": {}}, 'its key "events" is not a list'),
        ({"events": [1]}, "1 is not an event"),
        ({"events": [{"kind": "free", "bytes": "2"}]}, "the \"bytes\" of an event is '2'"),
        ({"events": [{"kind": "free", "tag": 2}]}, 'the "tag" of an event is 2'),
        ({"before": ["kv"]}, "'kv' is not a level"),
        ({"after": [{"tag": "kv", "device": 0}]}, 'the "resident_bytes" of a level is None'),
    ],
)
def test_a_malformed_file_is_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = events.write_events(tmp_path / "events.json", log=LOG)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidArgumentError) as raised:
        events.load_events(path)
    assert str(raised.value) == f"load_events: {path} is not a file of write_events: {message}"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"nonsense"])
def test_any_other_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="is not a file of write_events: ") as raised:
        events.load_events(path)
    assert "\n" not in str(raised.value)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.touch()
    with pytest.raises(InvalidArgumentError, match=r"is not a file of write_events: it is empty$"):
        events.load_events(path)


def test_devices_may_be_unknown(tmp_path: Path) -> None:
    path = events.write_events(tmp_path / "events.json", log=LOG)
    data = json.loads(path.read_text())
    del data["devices"], data["exited"]
    path.write_text(json.dumps(data))
    assert events.load_events(path) == dataclasses.replace(LOG, devices=(), exited=False)


def test_later_releases_may_say_more(tmp_path: Path) -> None:
    path = events.write_events(tmp_path / "events.json", log=LOG)
    data = json.loads(path.read_text())
    data["events"][0]["news"] = [1]
    path.write_text(json.dumps(data | {"more": 1}))
    assert events.load_events(path) == LOG


def test_a_file_that_cannot_be_written_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = events.write_events(tmp_path / "events.json", log=LOG)

    def full(source: Any, target: Any, **folders: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"write_events: No space left on device: the events were not written") as raised:
        events.write_events(path, log=dataclasses.replace(LOG, pid=1))
    assert raised.value.filename == str(path)
    assert events.load_events(path) == LOG
    assert os.listdir(tmp_path) == ["events.json"], "nothing is left behind"
