"""Guards snapshots and their files: what they hold, how they are named, written, kept, and what a failure does."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
import pickletools
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_regions import core_region
from recording_torch import RecordingTorch

from torch_memory_saver import _core, _files
from torch_memory_saver._files import default_role
from torch_memory_saver._torch.binding import history, layer
from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError
from torch_memory_saver.observe.memory import MemorySnapshotSampler, sampler, take_snapshot, write_snapshot
from torch_memory_saver.observe.memory.snapshot_reader import KEY

MIB = 1 << 20


@pytest.fixture
def torch(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> RecordingTorch:
    """torch on one device in use, which has handed out part of one segment."""
    fake = RecordingTorch("2.11.0")
    fake.snapshot = {
        "segments": [
            {"device": 0, "address": 1 << 40, "total_size": 20 * MIB, "allocated_size": 3 * MIB, "blocks": []},
            {"device": 0, "address": 2 << 40, "total_size": 2 * MIB, "allocated_size": 512, "blocks": []},
        ],
        "device_traces": [[]],
    }
    monkeypatch.setattr(layer, "require_module", lambda: fake)
    monkeypatch.setattr(layer, "imported", lambda: fake)
    monkeypatch.setattr(history, "_recorder", history._Recorder())
    monkeypatch.setattr(_core, "active_devices", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def segment(simulator: Any) -> Any:
    """The address of a managed allocation of 3 MiB."""
    with core_region("weights", 0, True):
        address = _core.allocate(3 * MIB, 0)
    yield address
    _core.free(address)


def load(path: Path | None) -> dict[str, Any]:
    assert path is not None
    with open(path, "rb") as file:
        snapshot: dict[str, Any] = pickle.load(file)
    return snapshot


def test_a_snapshot_has_torchs_part_as_it_is_and_the_managed_segments(torch: RecordingTorch, segment: int) -> None:
    snapshot = take_snapshot(tag="after_step", step=42, role="trainer")
    own = snapshot.pop(KEY)
    assert snapshot == torch.snapshot
    assert KEY not in torch.snapshot, "torch's own dict is left alone"
    assert own.pop("time_ns") > own.pop("started_ns") > 0
    free, total = _core.device_memory(0)
    assert own == {
        "format": 1,
        "pid": os.getpid(),
        "role": "trainer",
        "tag": "after_step",
        "step": 42,
        "history": {"enabled": False, "host": False},
        "segments": [
            {
                "address": segment,
                "bytes": 3 * MIB,
                "reserved_bytes": 4 * MIB,
                "device": 0,
                "state": "active",
                "backup": "none",
                "tag": "weights",
            }
        ],
        "devices": [{"device": 0, "allocated": 3 * MIB + 512, "reserved": 22 * MIB, "free": free, "total": total}],
    }


def test_the_state_of_paused_memory_is_in_the_snapshot(torch: RecordingTorch, segment: int) -> None:
    _core.pause(None, None)
    assert [row["state"] for row in take_snapshot()[KEY]["segments"]] == ["paused"]
    _core.resume(None, None)


def test_a_device_in_use_without_segments_has_a_row(torch: RecordingTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.snapshot["segments"] = []
    assert [(row["device"], row["reserved"]) for row in take_snapshot()[KEY]["devices"]] == [(0, 0)]
    monkeypatch.setattr(_core, "active_devices", lambda: 0)
    assert take_snapshot()[KEY]["devices"] == []


def test_the_rank_is_torch_distributeds_else_the_variables(torch: RecordingTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rank" not in take_snapshot()[KEY]
    monkeypatch.setenv("RANK", "3")
    assert take_snapshot()[KEY]["rank"] == 3
    torch.ranks = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 5)
    assert take_snapshot()[KEY]["rank"] == 5
    torch.ranks.is_initialized = lambda: False
    monkeypatch.setenv("RANK", "no number")
    assert "rank" not in take_snapshot()[KEY]


def test_the_role_is_the_programs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, role in (
        (["/usr/lib/engine.py"], "engine"),
        (["/usr/lib/engine/__main__.py", "--port"], "engine"),
        (["-c"], os.path.basename(sys.orig_argv[0])),
    ):
        monkeypatch.setattr(sys, "argv", arguments)
        assert default_role() == role


def test_the_role_in_a_process_of_multiprocessing_is_its_name_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["engine.py"])
    monkeypatch.setattr(multiprocessing.current_process(), "name", "Worker-1")
    assert default_role() == "Worker-1"


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        (b"sglang::scheduler_TP0\0\0\0", "sglang::scheduler_TP0"),  # as setproctitle leaves it
        (sys.orig_argv[0].encode() + b"\0engine.py\0", "engine"),
    ],
)
def test_the_title_that_a_process_has_given_itself_is_its_role(
    command_line: bytes, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmdline").write_bytes(command_line)
    monkeypatch.setattr(_files, "_COMMAND_LINE", str(tmp_path / "cmdline"))
    monkeypatch.setattr(sys, "argv", ["engine.py"])
    assert default_role() == role
    monkeypatch.setattr(_files, "_COMMAND_LINE", str(tmp_path / "missing"))
    assert default_role() == "engine"


def test_the_history_that_is_recorded_is_in_the_snapshot(torch: RecordingTorch) -> None:
    history.record_history(77)
    assert take_snapshot()[KEY]["history"] == {"enabled": True, "host": False, "max_entries": 77, "stacks": "python"}


def test_the_file_is_a_pickle_of_protocol_4_without_objects(torch: RecordingTorch, tmp_path: Path) -> None:
    path = write_snapshot(tmp_path / "folder" / "snapshot.pickle", step=1)
    assert path == tmp_path / "folder" / "snapshot.pickle"
    assert os.listdir(path.parent) == ["snapshot.pickle"]
    operations = list(pickletools.genops(path.read_bytes()))
    assert [argument for operation, argument, _ in operations if operation.name == "PROTO"] == [4]
    assert {operation.name for operation, _, _ in operations} & {
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "NONE",
        "SETITEM",
    } == set()
    assert load(path)[KEY]["step"] == 1


def test_a_file_is_replaced_only_when_the_new_one_is_whole(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_snapshot(tmp_path / "snapshot.pickle", tag="first")

    def fail(snapshot: object, file: Any, protocol: int) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_files.pickle, "dump", fail)
    with pytest.raises(OSError, match="No space left on device: the snapshot was not written; make room") as raised:
        write_snapshot(path, tag="second")
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == ["snapshot.pickle"]
    assert load(path)[KEY]["tag"] == "first"


def test_file_names_have_the_parts_that_exist(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    path = MemorySnapshotSampler(tmp_path, role="trainer").sample(3)
    assert path == tmp_path / "step-000003" / f"pid{pid}-trainer.pickle"
    monkeypatch.setenv("RANK", "1")
    path = MemorySnapshotSampler(tmp_path, tag="a/b", role="sglang::scheduler TP0").sample(1234567)
    assert path == tmp_path / "step-1234567" / f"a_b-rank1-pid{pid}-sglang_scheduler_TP0.pickle"
    own = load(path)[KEY]
    assert (own["tag"], own["role"], own["step"]) == ("a/b", "sglang::scheduler TP0", 1234567)


def test_samplers_without_steps_share_a_counter(torch: RecordingTorch, tmp_path: Path) -> None:
    trainer = MemorySnapshotSampler(tmp_path, role="trainer")
    engine = MemorySnapshotSampler(tmp_path, role="engine")
    for number in (1, 2, 3):
        paths = [sampler.sample() for sampler in (trainer, engine)]
        assert {path.parent.name for path in paths if path} == {f"step-{number:06d}"}
        assert [load(path)[KEY]["step"] for path in paths] == [number, number]


def test_the_oldest_moments_are_removed(torch: RecordingTorch, tmp_path: Path) -> None:
    one = MemorySnapshotSampler(tmp_path, keep=2)
    for step in (10, 20, 30):
        one.sample(step)
    assert sorted(os.listdir(tmp_path)) == ["step-000020", "step-000030"]
    MemorySnapshotSampler(tmp_path, keep=None).sample(40)
    assert len(os.listdir(tmp_path)) == 3
    again = MemorySnapshotSampler(tmp_path, keep=2)  # a run that goes on from an earlier step
    again.sample(5)
    again.sample(6)
    assert sorted(os.listdir(tmp_path)) == ["step-000005", "step-000006"]


def test_a_moment_that_is_removed_meanwhile_is_made_again(
    torch: RecordingTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, removed = os.replace, []

    def after_a_removal(source: str, target: str, **folders: int) -> None:
        if not removed:
            removed.append(target)
            (tmp_path / "step-000001").rmdir()
        replace(source, target, **folders)

    monkeypatch.setattr(_files.os, "replace", after_a_removal)
    path = MemorySnapshotSampler(tmp_path).sample(1)
    assert removed == [path.name]
    assert load(path)[KEY]["step"] == 1
    assert os.listdir(tmp_path) == ["step-000001"]


def test_failures_are_raised_or_counted(torch: RecordingTorch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    unwritable = tmp_path / "file" / "folder"
    with pytest.raises(OSError, match="Not a directory"):
        MemorySnapshotSampler(unwritable).sample(1)
    counting = MemorySnapshotSampler(unwritable, on_error="count")
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        assert counting.sample(1) is None
        assert counting.sample() is None
    assert counting.failures == 2
    assert isinstance(counting.last_failure, OSError)
    assert len(caplog.records) == 1
    assert f"no memory snapshot was written to {unwritable}: " in caplog.text
    assert "See that the folder can be written" in caplog.text


@pytest.mark.parametrize(
    "arguments", [{"keep": 0}, {"keep": True}, {"keep": "3"}, {"on_error": "ignore"}, {"on_error": None}]
)
def test_malformed_arguments(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
        MemorySnapshotSampler(tmp_path, **arguments)


@pytest.mark.parametrize("step", [-1, 1.5, True, "4"])
def test_a_malformed_step_is_raised_even_where_failures_are_counted(
    step: Any, torch: RecordingTorch, tmp_path: Path
) -> None:
    one = MemorySnapshotSampler(tmp_path, on_error="count")
    with pytest.raises(InvalidArgumentError, match="step"):
        one.sample(step)
    assert one.failures == 0


def test_synchronizing_waits_for_the_ranks_and_then_for_the_devices(torch: RecordingTorch, tmp_path: Path) -> None:
    order: list[str] = []
    torch.cuda.synchronize = lambda device: order.append(f"device {device}")
    torch.cuda.memory._snapshot = lambda: order.append("snapshot") or torch.snapshot
    one = MemorySnapshotSampler(tmp_path, synchronize=True)
    one.sample()
    assert order == ["device 0", "snapshot"]
    order.clear()
    torch.ranks = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 0,
        barrier=lambda: order.append("barrier"),
    )
    one.sample()
    assert order == ["barrier", "device 0", "snapshot"]
    order.clear()
    MemorySnapshotSampler(tmp_path).sample()
    assert order == ["snapshot"]


def test_during_a_capture_it_does_not_synchronize(torch: RecordingTorch, tmp_path: Path) -> None:
    torch.capturing = True
    with pytest.raises(CaptureInProgressError, match="being captured"):
        MemorySnapshotSampler(tmp_path, synchronize=True).sample()
    torch.capturing = False
    identity = _core.capture_begin_on(1 << 40)
    try:
        with pytest.raises(CaptureInProgressError, match="being captured"):
            MemorySnapshotSampler(tmp_path, synchronize=True).sample()
        assert torch.synchronized == []
        assert MemorySnapshotSampler(tmp_path).sample() is not None
    finally:
        _core.capture_end(identity)


def test_threads_that_sample_at_once_write_a_moment_each(torch: RecordingTorch, tmp_path: Path) -> None:
    one = MemorySnapshotSampler(tmp_path, keep=None)
    paths: list[Path | None] = []
    threads = [threading.Thread(target=lambda: paths.append(one.sample())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.parent.name for path in paths if path) == [f"step-{number:06d}" for number in range(1, 6)]


def test_the_default_keeps_enough_for_a_comparison() -> None:
    assert sampler.DEFAULT_KEEP >= 3
