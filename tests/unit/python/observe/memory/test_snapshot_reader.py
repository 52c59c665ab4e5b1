"""Guards snapshot_reader.py: nothing of a file is run, what is no snapshot is named, and the snapshots of every release of
PyTorch are read."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from snapshots import KIB, MIB, Call, allocation, block, frames_of, free, recorded_files, segment, snapshot

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.memory import Snapshot, load_snapshot
from torch_memory_saver.observe.memory.model import BlockState, Origin

BASE = 1 << 40
CALL = ("/srv/main.py", 3, "main")
NATIVE = (("??", 0, "torch::unwind::unwind()"), ("Python/ceval.c", 4769, "_PyEval_EvalFrameDefault"))


def write(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def load(tmp_path: Path, content: object) -> Snapshot:
    return load_snapshot(write(tmp_path / "a.pickle", content))


def refused(path: Path) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        load_snapshot(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


class Runs:
    """A value whose pickle calls os.mkdir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def one_block(*calls: Call) -> dict[str, Any]:
    """A snapshot with one block of 1 KiB."""
    return snapshot(segment(BASE, block(KIB, *calls or (CALL,)), free(2 * MIB - KIB)))


def snapshot_with(value: object) -> dict[str, Any]:
    return snapshot() | {"external_annotations": [value]}


def test_a_function_is_not_called(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pickle", snapshot_with(Runs(tmp_path / "made")))
    message = refused(path)
    assert not (tmp_path / "made").exists()
    assert "posix.mkdir" in message and "do not use a file from a source that you do not trust" in message


@pytest.mark.parametrize("value", [complex(1, 2), Path("x"), {1, 2}.__class__, bytearray(b"x"), Origin.PYTHON])
def test_every_class_is_refused(tmp_path: Path, value: object) -> None:
    message = refused(write(tmp_path / "a.pickle", snapshot_with(value)))
    assert "a class or a function" in message


def test_a_file_that_is_cut_off_says_so(tmp_path: Path) -> None:
    whole = pickle.dumps(one_block(), protocol=4)
    # Where an instruction ends, and in its middle.
    ends = {position for _, _, position in pickletools.genops(whole) if position}
    path = tmp_path / "cut.pickle"
    for length in sorted({*ends, *(end + 1 for end in ends), 0} - {len(whole)}):
        path.write_bytes(whole[:length])
        assert "cut off" in refused(path), length


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"torch", b"PK\x03\x04", b"\x80\x04}\x94.", b"\x80\xff."])
def test_another_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    message = refused(path)
    assert "torch.cuda.memory._dump_snapshot()" in message or "cut off" in message


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([], '"segments"'),
        ({"segments": 3}, '"segments"'),
        ({"segments": [{"device": 0}]}, "'address' is missing"),
        ({"segments": [3]}, "int"),
        ({"segments": [], "device_traces": [[{"addr": 1}]]}, "'action' is missing"),
        ({"segments": [], "torch_memory_saver": {"format": 2}}, "install a newer one"),
        ({"segments": [], "torch_memory_saver": {"format": 1, "rank": "x"}}, "'x' is not a number"),
    ],
)
def test_another_pickle_is_named(tmp_path: Path, content: object, what: str) -> None:
    assert what in refused(write(tmp_path / "a.pickle", content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in (text := refused(tmp_path / "missing.pickle"))
    assert "`run --record snapshots` makes a snapshot before each pause" in text


def test_a_state_that_is_not_known_is_named(tmp_path: Path) -> None:
    content = one_block()
    content["segments"][0]["blocks"][0]["state"] = "active_elsewhere"
    assert "'active_elsewhere'" in refused(write(tmp_path / "a.pickle", content))


def test_the_blocks_of_a_segment() -> None:
    """As PyTorch wrote them."""
    read = load_snapshot(recorded_files()[0])
    segment = read.segments[-1]
    assert (segment.bytes, segment.live_bytes, segment.device, segment.pool) == (20 * MIB, 39 * MIB // 4, 0, (0, 0))
    live, rest = segment.blocks[:2]
    assert (live.address, live.bytes, live.state) == (segment.address, 4 * MIB, BlockState.ALLOCATED)
    assert (rest.address, rest.bytes, rest.live) == (segment.address + 4 * MIB, 9 * MIB, False)
    assert live.stack.frames[0].name == "__init__"
    rounded = read.segments[3].blocks[-1]
    assert (rounded.bytes, rounded.requested_bytes) == (2 * MIB, 5 * MIB // 4)
    assert [(row.tag, row.paused) for row in read.segments if row.pool != (0, 0)] == [("kv_cache", True)]
    actions = [event.action for event in read.events[0]][2:6]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed"]


def test_a_snapshot_of_pytorch_2_0(tmp_path: Path) -> None:
    block = {"size": 512, "state": "active_allocated", "history": [{"addr": 8, "real_size": 300, "frames": frames_of(CALL)}]}
    older = {"addr": 8, "real_size": 9, "frames": frames_of(("/old.py", 1, "old"))}
    reused = block | {"history": [*block["history"], older]}  # type: ignore[misc]
    waiting = {"size": 1024, "state": "active_pending_free", "history": [older]}
    segment = {
        "device": 1,
        "address": 4096,
        "total_size": 2 * MIB,
        "allocated_size": 512,
        "active_size": 1536,
        "stream": 0,
        "segment_type": "small",
        "blocks": [reused, {"size": 512, "state": "inactive"}, waiting],
    }
    (read,) = load(tmp_path, {"segments": [segment]}).segments
    assert [(row.address, row.requested_bytes) for row in read.blocks] == [(4096, 300), (4608, 512), (5120, 9)]
    assert [row.state for row in read.blocks] == [BlockState.ALLOCATED, BlockState.INACTIVE, BlockState.AWAITING_FREE]
    assert read.blocks[0].stack.frames == (CALL,)
    assert read.pool == (0, 0)


def test_cpp_frames_are_folded(tmp_path: Path) -> None:
    content = snapshot(segment(BASE, *(block(KIB, *native, CALL) for native in ((), NATIVE, NATIVE * 2))))
    blocks = list(load(tmp_path, content).live_blocks(0))
    assert len({block.stack for block in blocks}) == 1
    assert [block.stack.frames for block in blocks] == [(CALL,)] * 3


def test_a_stack_of_cpp_frames_only(tmp_path: Path) -> None:
    (block,) = load(tmp_path, one_block(*NATIVE)).live_blocks(0)
    assert (block.stack.origin, block.stack.native_frames) == (Origin.NATIVE, 2)


def test_frames_that_are_python(tmp_path: Path) -> None:
    calls = (("<string>", 1, "<module>"), ("/tmp/ipykernel_1/2.py", 3, "<module>"), ("/usr/bin/torchrun", 8, "<module>"))
    (block,) = load(tmp_path, one_block(*calls)).live_blocks(0)
    assert block.stack.frames == calls


def test_what_is_known_of_a_block_without_a_stack(tmp_path: Path) -> None:
    """A block from before the recording, and one of a thread without Python frames."""
    content = snapshot(segment(BASE, block(KIB), block(2 * KIB)), events=[allocation(BASE + KIB, 2 * KIB)])
    early, late = load(tmp_path, content).live_blocks(0)
    assert (early.stack.origin, late.stack.origin) == (Origin.UNRECORDED, Origin.NO_FRAMES)


def test_the_key_of_this_package(tmp_path: Path) -> None:
    segments = segment(BASE, block(2 * MIB, CALL)), segment(BASE + 64 * MIB, block(12 * MIB, CALL))
    managed = {"address": BASE, "bytes": 2 * MIB, "reserved_bytes": 2 * MIB, "device": 0, "state": "paused", "tag": "kv"}
    own: dict[str, Any] = {
        "role": "trainer",
        "rank": 3,
        "pid": 77,
        "step": 5,
        "tag": "after",
        "segments": [managed | {"backup": "none"}],
    }
    read = load(tmp_path, snapshot(*segments, **own))
    assert (read.role, read.rank, read.pid, read.step, read.tag) == ("trainer", 3, 77, 5, "after")
    assert [(row.state, row.tag, row.paused) for row in read.segments] == [("paused", "kv", True), ("", "", False)]
    assert read.history_enabled is True
    without = load(tmp_path, snapshot(*segments))
    assert (without.role, without.rank, without.pid, without.history_enabled) == ("", None, None, None)


def test_values_that_are_none(tmp_path: Path) -> None:
    content = snapshot(rank=None, step=None) | {"device_traces": None}
    assert load(tmp_path, content).rank is None
