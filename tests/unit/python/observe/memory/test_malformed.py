"""Guards the readers of files against every malformed content: it is read, or refused by an error that names the file.

Hypothesis changes a value somewhere in the content of a good file, and cuts and changes its bytes.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshots import MIB, block, free, segment, snapshot

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.events import Device, Event, EventLog, Level, load_events
from torch_memory_saver.observe.events.chrome_trace import write_chrome_trace
from torch_memory_saver.observe.events.event_file import log_to_json
from torch_memory_saver.observe.events.timeline.files import read_logs, write_timeline
from torch_memory_saver.observe.memory import compare, load_snapshot
from torch_memory_saver.observe.memory.log import MemoryRow, append_rows, read_memory_log

EXAMPLES = 200

LOG = EventLog(
    events=(Event("allocate", tag="a", device=0, bytes=7, began_ns=1, ended_ns=2), Event("end", "pause", call=1)),
    before=(Level("a", 1, 2, 3, 4),),
    after=(Level("a", 1, 2, 3, 4),),
    dropped=0,
    capacity=16,
    taken_ns=12,
    wall_offset_ns=-5,
    pid=77,
    rank=0,
    role="trainer",
    host="node",
    boot_id="boot",
    devices=(Device(0, "GPU-0", 1 << 33),),
)
EVENTS = log_to_json(LOG)
SNAPSHOT = snapshot(segment(1 << 40, block(MIB, ("/srv/main.py", 3, "main")), free(MIB), is_expandable=True)) | {
    "device_traces": [[{"action": "alloc", "addr": 1 << 40, "size": MIB, "frames": [], "stream": 0}]],
    "torch_memory_saver": {
        "format": 1,
        "pid": 7,
        "rank": 0,
        "role": "trainer",
        "tag": "",
        "step": 1,
        "time_ns": 5,
        "history": {"enabled": True, "host": False},
        "segments": [{"address": 1 << 40, "bytes": 2 * MIB, "device": 0, "state": "active", "tag": "a"}],
    },
}


def paths(content: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a content."""
    yield path
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield from paths(content[key], (*path, key))  # type: ignore[index]


def changed(content: Any, path: tuple[Any, ...], value: object) -> Any:
    """The content with another value in one place, or without it."""
    if not path:
        return value
    result = copy.deepcopy(content)
    place = result
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


MISSING = object()


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
VALUES = st.just(MISSING) | JSON
PLAIN = VALUES | st.binary(max_size=4) | st.tuples(JSON) | st.sampled_from([10**400, -(10**400)])


def read_or_refused(read: Callable[[Path], object], content: bytes) -> Any:
    """What is read from a file with that content, or None after an error that names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        try:
            return read(path)
        except InvalidArgumentError as error:
            assert str(path) in str(error)
            return None


@given(st.sampled_from(list(paths(EVENTS))), VALUES)
@example(("rank",), MISSING)
@example(("role",), "\ud800")
@settings(max_examples=EXAMPLES)
def test_events(path: tuple[Any, ...], value: object) -> None:
    content = changed(EVENTS, path, None if value is MISSING and not path else value)
    log = read_or_refused(load_events, json.dumps(content).encode())
    if log is None:
        return
    with tempfile.TemporaryDirectory() as folder:  # what was read can be used
        write_chrome_trace(Path(folder, "trace"), log=log)
        write_timeline(Path(folder, "page"), logs=[log])


@given(st.sampled_from(list(paths(SNAPSHOT))), PLAIN)
@example(("segments", 0, "blocks", 0, "size"), float("inf"))
@example(("segments", 0, "total_size"), 10**400)
@settings(max_examples=EXAMPLES)
def test_snapshots(path: tuple[Any, ...], value: object) -> None:
    content = changed(SNAPSHOT, path, None if value is MISSING and not path else value)
    raw = pickle.dumps(content, protocol=4)
    if read_or_refused(load_snapshot, raw) is None:
        return
    with tempfile.TemporaryDirectory() as folder:  # what was read can be compared
        file = Path(folder, "moment.pickle")
        file.write_bytes(raw)
        comparison = compare(file, file)
        assert comparison.table(80, 5, False)
        assert comparison.html()


@pytest.mark.parametrize("depth", [100, 400, 900, 960, 990, 20_000])
def test_an_event_that_is_nested_deeply(depth: int) -> None:
    content = json.dumps(EVENTS | {"events": ["here"]}).replace('"here"', "[" * depth + "]" * depth)
    assert read_or_refused(load_events, content.encode()) is None


@pytest.mark.parametrize("path", [("segment_type",), ("device",), ("blocks", 0, "state")])
@pytest.mark.parametrize("value", [nested(100), nested(200), 10**5000], ids=["deep", "deeper", "large"])
def test_a_value_of_a_snapshot_that_cannot_be_shown(path: tuple[Any, ...], value: object) -> None:
    content = changed(SNAPSHOT, ("segments", 0, *path), value)
    assert read_or_refused(load_snapshot, pickle.dumps(content, protocol=4)) is None


def test_a_fifo_in_a_folder_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    os.mkfifo(tmp_path / "a.pickle")
    with pytest.raises(InvalidArgumentError, match="has no event file"):
        read_logs([tmp_path])
    with pytest.raises(InvalidArgumentError, match=re.escape(str(tmp_path))):
        compare(tmp_path)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Cuts of a content, and contents with other bytes at one place."""

    def replace(place: int, other: bytes) -> bytes:
        return content[:place] + other + content[place + len(other) :]

    return st.integers(0, len(content)).map(lambda length: content[:length]) | st.builds(
        replace, st.integers(0, len(content)), st.binary(min_size=1, max_size=8)
    )


@given(damaged(pickle.dumps(SNAPSHOT, protocol=4)))
@example(b"\x80\x04\x8e" + (1 << 54).to_bytes(8, "little"))  # the length of bytes that no memory has
@settings(max_examples=EXAMPLES)
def test_bytes_of_a_snapshot(content: bytes) -> None:
    read_or_refused(load_snapshot, content)


@given(damaged(json.dumps(EVENTS).encode()))
@settings(max_examples=EXAMPLES)
def test_bytes_of_an_event_file(content: bytes) -> None:
    read_or_refused(load_events, content)


def a_memory_log() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        append_rows(Path(folder, "log.csv"), [MemoryRow(4, "engine", 8, 0, "mark")])
        return Path(folder, "log.csv").read_bytes()


@given(damaged(a_memory_log()))
@example(b"\xff")
@example(a_memory_log() + b"1,\0")
@example(a_memory_log() + b"x" * (1 << 18))
@settings(max_examples=EXAMPLES)
def test_bytes_of_a_memory_log(content: bytes) -> None:
    read_or_refused(read_memory_log, content)


@given(damaged(gzip.compress(json.dumps({"traceEvents": [], "baseTimeNanoseconds": 1}).encode(), mtime=0)))
@settings(max_examples=EXAMPLES)
def test_bytes_of_a_trace(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.gz")
        path.write_bytes(content)
        try:
            write_chrome_trace(Path(folder, "merged"), log=LOG, merge=path)
        except InvalidArgumentError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 1.5, "1", True, None])
def test_a_size_is_a_whole_number_of_64_bits(tmp_path: Path, value: object) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(changed(SNAPSHOT, ("segments", 0, "total_size"), value), protocol=4))
    with pytest.raises(InvalidArgumentError, match="is not a snapshot that this release can read"):
        load_snapshot(path)
