"""Guards MemoryLog and log_memory: the bytes of a row, marks and intervals, files of several processes, decorated calls."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_torch import PEAK_ABOVE, FakeTorch

import torch_memory_saver
from torch_memory_saver import _core
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe._nvml import ProcessShare
from torch_memory_saver.observe.memory import MemoryLog, MemoryRow, log_memory, read_memory_log
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


@pytest.fixture
def saver(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> TorchMemorySaver:
    monkeypatch.setattr(torch_memory_saver, "torch_memory_saver", saver)
    monkeypatch.setattr(ProcessShare, "bytes", lambda self, uuid, known: None)
    return saver


def labels(log: MemoryLog) -> list[str]:
    return [row.label for row in log.rows]


# Rows


def test_a_row_has_the_bytes(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[str, int]] = []

    def share(self: ProcessShare, uuid: str, least: int) -> int:
        known.append((uuid, least))
        return 16 * MIB

    monkeypatch.setattr(ProcessShare, "bytes", share)
    log = MemoryLog("engine", rank=3)
    log._clock = lambda: 12.5
    with saver.region("paused", enable_cpu_backup=True):
        fake_torch.allocate(8 * MIB)
    with saver.region("kept"):
        fake_torch.allocate(4 * MIB)
    fake_torch.free(fake_torch.allocate(2 * MIB))
    saver.pause("paused")
    (row,) = log.mark("asleep")
    of_device = _core.device_memory(0)
    used = of_device.total - of_device.free
    assert row == MemoryRow(
        time=12.5,
        role="engine",
        pid=os.getpid(),
        rank=3,
        label="asleep",
        device=0,
        allocated=12 * MIB,
        reserved=14 * MIB,
        peak_allocated=12 * MIB + PEAK_ABOVE,
        peak_reserved=14 * MIB + PEAK_ABOVE,
        physical=6 * MIB,
        resident=4 * MIB,
        paused=8 * MIB,
        device_used=used,
        device_free=of_device.free,
        process=16 * MIB,
        other_processes=max(0, used - 16 * MIB),
        host_backup=saver.stats().host_resident_bytes,
        summary="",
    )
    assert row.host_backup == 8 * MIB
    assert known == [("GPU-0", 6 * MIB)]
    saver.resume()


def test_a_summary_at_marks_only(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with MemoryLog("engine", summary=True, interval=1000) as log:
        (row,) = log.mark("now")
    assert [row.summary for row in log.rows] == ["", "a table,\nof device 0", ""]
    assert row.summary == "a table,\nof device 0"


def test_a_process_that_does_not_use_cuda(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "in_use", lambda: None)
    (row,) = MemoryLog("tokenizer").mark("now")
    assert (row.role, row.device, row.reserved, row.host_backup) == ("tokenizer", None, None, 0)


def test_the_last_rows_are_kept(saver: TorchMemorySaver) -> None:
    log = MemoryLog("engine", most_rows=2)
    for label in "abc":
        log.mark(label)
    assert labels(log) == ["b", "c"]


def test_the_role_and_rank_of_the_environment(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    (row,) = MemoryLog().mark()
    assert row.rank == 5 and row.role


def test_bad_arguments(saver: TorchMemorySaver) -> None:
    bad: list[dict[str, Any]] = [{"interval": 0}, {"interval": float("nan")}, {"interval": True}]
    bad += [{"most_rows": 0}, {"most_rows": 1.5}]
    for arguments in bad:
        with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
            MemoryLog("engine", **arguments)


# Intervals


def test_rows_at_an_interval(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())  # tqdm keeps a thread
    taken = threading.Event()
    threads: list[str] = []
    take = MemoryLog._take

    def count(self: MemoryLog, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        rows = take(self, *arguments)
        if len(threads) >= 4:
            taken.set()
        return rows

    monkeypatch.setattr(MemoryLog, "_take", count)
    with MemoryLog("engine", interval=0.001) as log:
        assert log.start() is log
        assert taken.wait(60)
    assert set(threading.enumerate()) <= before
    assert [name == "MainThread" for name in threads] == [True, *([False] * (len(threads) - 2)), True]
    assert set(threads[1:-1]) == {"torch_memory_saver: memory log of engine"}
    assert len(log.rows) == len(threads)
    log.stop()


def test_a_log_in_a_forked_child(program: Any, tmp_path: Path) -> None:
    text = f"""
import os, threading, time
from torch_memory_saver.observe.memory import MemoryLog, read_memory_log
path = {str(tmp_path / "log.csv")!r}
log = MemoryLog("engine", path=path, interval=0.01).start()
pid = os.fork()
if pid == 0:
    end = time.monotonic() + 60
    while all(row.pid != os.getpid() for row in log.rows) and time.monotonic() < end:
        pass
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
log.stop()
pids = {{row.pid for row in read_memory_log(path)}}
assert pids == {{pid, os.getpid()}}, pids
"""
    program(text, preloaded=False)


# CSV


def test_rows_go_to_a_file_and_back(saver: TorchMemorySaver, fake_torch: FakeTorch, tmp_path: Path) -> None:
    log = MemoryLog('a "role", quoted', path=tmp_path / "log.csv", summary=True)
    log.mark("first")
    log.mark("second\nline")
    assert tuple(read_memory_log(tmp_path / "log.csv")) == log.rows
    log.write_csv(tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_bytes() == (tmp_path / "log.csv").read_bytes()
    names = (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    assert names == [field.name for field in dataclasses.fields(MemoryRow)]


def test_several_processes_append_to_one_file(program: Any, tmp_path: Path) -> None:
    text = f"""
import os
from torch_memory_saver.observe.memory import MemoryLog
logs = [MemoryLog(str(number), path={str(tmp_path / "log.csv")!r}) for number in range(2)]
children = []
for log in logs:
    pid = os.fork()
    if pid == 0:
        for number in range(50):
            log.mark(str(number))
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
"""
    program(text, preloaded=False)
    rows = read_memory_log(tmp_path / "log.csv")
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    for role in "01":
        assert [row.label for row in rows if row.role == role] == [str(number) for number in range(50)]
    assert len({row.pid for row in rows}) == 2


def test_files_that_are_not_memory_logs(saver: TorchMemorySaver, tmp_path: Path) -> None:
    other, cut = tmp_path / "other.csv", tmp_path / "cut.csv"
    other.write_text("a,b\n1,2\n")
    MemoryLog("engine", path=cut).mark()
    cut.write_text(cut.read_text() + "1.5,engine,7")
    with pytest.raises(InvalidArgumentError, match=r"other\.csv is not a memory log"):
        read_memory_log(other)
    with pytest.raises(InvalidArgumentError, match=r"cut\.csv, line 3: there is no rank"):
        read_memory_log(cut)
    (tmp_path / "empty.csv").touch()
    assert read_memory_log(tmp_path / "empty.csv") == []


def test_a_row_that_cannot_be_written_is_an_error(saver: TorchMemorySaver, tmp_path: Path) -> None:
    log = MemoryLog("engine", path=tmp_path / "missing" / "log.csv")
    with pytest.raises(FileNotFoundError):
        log.mark("kept")
    assert labels(log) == ["kept"]


# Decorated calls


def test_rows_before_and_after_a_call(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    logged = log_memory(role="engine")

    @logged
    def sleep(seconds: int) -> int:
        """What it says."""
        saver.pause()
        return seconds

    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    assert (sleep(3), sleep.__name__, sleep.__doc__) == (3, "sleep", "What it says.")
    assert labels(logged.log) == ["before sleep", "after sleep"]
    assert [row.physical for row in logged.log.rows] == [2 * MIB, 0]
    assert logged.log.role == "engine"
    saver.resume()


def test_rows_of_methods_and_coroutines(saver: TorchMemorySaver) -> None:
    log = MemoryLog("engine")

    class Engine:
        @log_memory(log=log)
        async def update_weights(self) -> str:
            await asyncio.sleep(0)
            log.mark("inside")
            return "updated"

        @log_memory(log=log)
        def wake_up(self) -> None:
            raise KeyError

    assert asyncio.run(Engine().update_weights()) == "updated"
    with pytest.raises(KeyError):
        Engine().wake_up()
    assert labels(log) == [
        "before update_weights",
        "inside",
        "after update_weights",
        "before wake_up",
        "after wake_up (KeyError)",
    ]


def test_a_row_that_cannot_be_taken_does_not_end_the_call(
    saver: TorchMemorySaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged = log_memory(role="engine", path=tmp_path / "missing" / "log.csv")
    with caplog.at_level(logging.WARNING):
        assert logged(lambda: 5)() == 5
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"no row of the memory log {when} <lambda>: it could not be taken" for when in ("before", "after")]
    assert "FileNotFoundError" in caplog.text


def test_a_log_has_its_own_role(saver: TorchMemorySaver) -> None:
    for arguments in ({"role": "engine"}, {"path": "log.csv"}):
        with pytest.raises(InvalidArgumentError, match="either the log or these"):
            log_memory(log=MemoryLog("engine"), **arguments)  # type: ignore[arg-type]
