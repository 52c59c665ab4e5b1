"""Guards the recording `events` of TMS_DEBUG, and TMS_METRICS_FILE: what they write, when, and that a failure disturbs
nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver import _core
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events.from_environment import EventFile, MetricsFile

MIB = 1 << 20


def happen() -> None:
    """An event or two."""
    _core.free(_core.allocate(MIB, 0))


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


# Event files.


def test_the_file_is_replaced_if_something_happened(simulator: Any, tmp_path: Path) -> None:
    file = EventFile(str(tmp_path / "new"))
    happen()
    file.write_if_new()
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == f"pid{os.getpid()}.json"
    first = events.load_events(path)
    path.unlink()
    file.write_if_new()
    assert not path.exists(), "nothing new"
    happen()
    file.write_if_new()
    log = events.load_events(path)
    assert log.dropped + len(log.events) == first.dropped + len(first.events) + 2


def test_the_last_file_says_that_nothing_follows(simulator: Any, tmp_path: Path) -> None:
    file = EventFile(str(tmp_path))
    happen()
    file.write_if_new()
    (path,) = tmp_path.iterdir()
    before = events.load_events(path)
    file.write_if_new(exits=True)
    after = events.load_events(path)
    assert (before.exited, after.exited) == (False, True)
    assert after.events == before.events
    assert after.taken_ns > before.taken_ns


def test_the_name_gets_the_rank_once_it_is_known(simulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = EventFile(str(tmp_path))
    happen()
    file.write_if_new()
    monkeypatch.setenv("RANK", "3")
    happen()
    file.write_if_new()
    assert os.listdir(tmp_path) == [f"rank3-pid{os.getpid()}.json"]
    assert events.load_events(next(tmp_path.iterdir())).rank == 3


def test_a_failed_write_is_logged_once_and_counted(
    simulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = EventFile(str(tmp_path))
    happen()
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *_, **folders: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(3):
            file.write_if_new()
    assert file.failures == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "TMS_DEBUG=events: " in record.getMessage() and "No space left on device" in record.getMessage()
    assert os.listdir(tmp_path) == []
    file.write_if_new()
    assert len(os.listdir(tmp_path)) == 1, "what was not written yet is written later"


def test_every_process_from_its_first_use_on(program: Any, tmp_path: Path) -> None:
    """Nothing is written or started at import. A child inherits the variable, with spawn and with fork."""
    text = """
import subprocess, threading
from pathlib import Path
folder = Path(os.environ["TMS_DEBUG_DIR"]) / "events"
assert threading.active_count() == 1
if len(sys.argv) == 1:
    child = [sys.executable, "-c", sys.orig_argv[2], "child"]
    assert subprocess.run(child).returncode == 0
    assert len(list(folder.iterdir())) == 1
torch_memory_saver.stats()
assert threading.active_count() == 2
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
module.pause("kept")
"""
    program(text, TMS_DEBUG="events", TMS_DEBUG_DIR=str(tmp_path))
    logs = [events.load_events(path) for path in (tmp_path / "events").iterdir()]
    assert len({log.pid for log in logs}) == 2
    for log in logs:
        assert (log.capacity, log.dropped, log.exited) == (16384, 0, True)
        assert [device.device for device in log.devices] == [0] and log.devices[0].uuid.startswith("GPU-")
        assert [(level.tag, level.paused_bytes) for level in log.after] == [("kept", 2 * MIB)]
        assert sum(event.kind == "memory" for event in log.events) == 2, "the free memory is sampled"
        assert log.boot_id == logs[0].boot_id


def test_a_forked_child_writes_its_own_file(program: Any, tmp_path: Path) -> None:
    text = """
import time
from pathlib import Path
from torch_memory_saver.observe.events import from_environment
from torch_memory_saver.observe.events.from_environment import EventFile
file = EventFile(os.environ["FOLDER"])
os.register_at_fork(after_in_child=file.after_fork_in_child)
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
file.write_if_new()
own = Path(os.environ["FOLDER"]) / f"pid{os.getpid()}.json"
before = own.read_bytes()
file._lock.acquire()  # as another thread of the parent may hold it
pid = os.fork()
if pid == 0:
    status = 1
    try:
        file.write_if_new()
        assert os.listdir(os.environ["FOLDER"]) == [own.name], "it has no events yet"
        try:
            module.pause("kept")
        except module.errors.ForkedProcessError:
            pass
        file.write_if_new()
        assert len(os.listdir(os.environ["FOLDER"])) == 2
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
assert own.read_bytes() == before
"""
    program(text, FOLDER=str(tmp_path))


# Metrics.


def test_the_metrics_are_replaced_at_each_pause_and_resume(program: Any, tmp_path: Path) -> None:
    text = """
from pathlib import Path
file = Path(os.environ["TMS_METRICS_FILE"].replace("{pid}", str(os.getpid())).replace("{rank}", "none"))
def state():
    lines = [line for line in file.read_text().splitlines() if line.startswith("torch_memory_saver_memory_bytes{")]
    return {line.split('state="')[1].split('"')[0]: int(line.split()[-1]) for line in lines}
assert not file.exists()
torch_memory_saver.stats()
assert state() == {}
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
module.pause("kept")
assert state() == {"resident": 0, "slack": 0, "deferred": 0, "paused": 2 * MIB, "damaged": 0, "backup": 0}, state()
assert 'failures_total{operation="pause"} 0' in file.read_text()
module.resume("kept")
assert state() == {"resident": 2 * MIB, "slack": 0, "deferred": 0, "paused": 0, "damaged": 0, "backup": 0}
file.unlink()
module.pause("kept")
pending = module.resume("kept", wait=False)
file.unlink()
pending.wait()
assert state() == {"resident": 2 * MIB, "slack": 0, "deferred": 0, "paused": 0, "damaged": 0, "backup": 0}
assert os.listdir(file.parent) == [file.name]
"""
    program(text, TMS_METRICS_FILE=str(tmp_path / "metrics" / "{pid}-{rank}.prom"))


def test_a_failed_pause_rewrites_the_metrics(program: Any, tmp_path: Path) -> None:
    text = """
from pathlib import Path
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
_core.capture_begin(None, 0)
try:
    module.pause("kept")
    raise SystemExit("it did not fail")
except module.errors.CaptureInProgressError:
    pass
_core.capture_end()
assert 'torch_memory_saver_failures_total{operation="pause"} 1' in Path(os.environ["TMS_METRICS_FILE"]).read_text()
"""
    program(text, TMS_METRICS_FILE=str(tmp_path / "metrics.prom"))


def test_a_metrics_file_that_cannot_be_written_changes_nothing(program: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    text = """
with module.region(tag="kept"):
    cuda_malloc(2 * MIB)
for _ in range(3):
    assert module.pause("kept").bytes == 2 * MIB
    assert module.resume("kept").bytes == 2 * MIB
"""
    done = program(text, TMS_METRICS_FILE=str(tmp_path / "file" / "metrics.prom"))
    assert done.stderr.count("TMS_METRICS_FILE: ") == 1
    assert "write_metrics: Not a directory: the metrics were not written" in done.stderr
    assert (tmp_path / "file").read_text() == "no folder"


def test_the_rank_is_in_the_name(simulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    file = MetricsFile(str(tmp_path / "rank{rank}.prom"))
    file.write()
    assert os.listdir(tmp_path) == ["rank5.prom"]
    assert file.failures == 0
