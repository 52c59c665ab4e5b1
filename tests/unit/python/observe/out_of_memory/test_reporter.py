"""Guards when out-of-memory reports are made, what the program sees of them, and that they raise nothing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_torch import FakeTorch
from recorded_hooks import RUN_OF_FOUR

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.observe._out_of_memory import account, content, reporter
from torch_memory_saver.observe._out_of_memory.folder import ReportFolder
from torch_memory_saver.observe._out_of_memory.reporter import Reporter
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
_numbers = itertools.count()
#: Each waits for the others this long, in seconds.
TIMEOUT_S = 60


@pytest.fixture
def mine(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    """The reporter of a process that has made no report."""
    made = Reporter()
    monkeypatch.setattr(reporter, "reporter", made)
    monkeypatch.delenv("RANK", raising=False)
    yield made


@pytest.fixture
def folder(mine: Reporter, tmp_path: Path) -> Path:
    mine.write_to(ReportFolder(tmp_path / "reports"))
    return tmp_path / "reports"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.txt"))


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def make_error(message: str = "resume: too little memory.") -> errors.OutOfMemoryError:
    return errors.OutOfMemoryError(message, operation="resume", device=0, bytes=4 * MIB, driver_call="cuMemCreate")


@pytest.fixture
def short_of_memory(saver: TorchMemorySaver, fake_torch: FakeTorch, mine: Reporter) -> TorchMemorySaver:
    """300 of the device's 512 MiB are paused, and 300 are in use elsewhere."""
    with saver.region("a"):
        fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        fake_torch.allocate(300 * MIB)
    return saver


def test_a_failed_resume_names_the_largest_holder_and_the_report(short_of_memory: TorchMemorySaver, folder: Path) -> None:
    with pytest.raises(errors.OutOfMemoryError) as caught:
        short_of_memory.resume("a")
    (report,), (name,) = reports(folder), names(folder)
    first, *points = str(caught.value).splitlines()
    assert first == (
        "resume: device 0 needs 300.0 MiB and has 212.0 MiB free: 88.0 MiB are missing. The largest holder of device 0 is "
        "managed memory of this process that is resident: 300 MiB of 512 MiB (tag 'b': 300 MiB)."
    )
    assert points[0] == "- Everything stays paused, and resume() can be called again."
    assert points[-1] == f"- Report: {folder / name}"
    assert all(point.startswith("- ") for point in points)
    assert report["missing"] == {}
    assert report["failure"]["needed_bytes"] == 300 * MIB
    assert str(caught.value).startswith(report["failure"]["message"].splitlines()[0])
    assert [(row["tag"], row["resident_bytes"], row["paused_bytes"]) for row in report["tags"]] == [
        ("a", 0, 300 * MIB),
        ("b", 300 * MIB, 0),
    ]
    assert 'pause("b")' in report["summary"]


def test_paused_memory_is_named_beside_an_error_of_pytorchs(
    short_of_memory: TorchMemorySaver, mine: Reporter, simulator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    short_of_memory.pause("b")
    simulator.take_memory(300 * MIB)
    mine.observe(0, 400 * MIB, 512 * MIB, 212 * MIB)
    assert caplog.records[-1].getMessage() == (
        "PyTorch needs 400 MiB on device 0 and has 212 MiB free.\n- PyTorch counts 600 MiB of paused memory as allocated "
        "(tags 'a', 'b'), but it holds no memory of device 0."
    )


def test_without_a_folder_the_message_has_the_largest_holder_only(
    short_of_memory: TorchMemorySaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.OutOfMemoryError, match=r"The largest holder of device 0 is managed memory") as caught:
        short_of_memory.resume("a")
    assert "Report" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_that_succeeds_after_the_cache_is_emptied_makes_none(
    saver: TorchMemorySaver, fake_torch: FakeTorch, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver.region("a"):
        fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        idle = fake_torch.allocate(300 * MIB)
    fake_torch.free(idle)
    real = _core.device_memory  # so that the first attempt is made, and fails
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((real(device).total, real(device).total)))
    failures = _core.counters()["failures_total"]
    assert saver.resume("a").allocations == 1
    assert _core.counters()["failures_total"] == failures + 1
    assert not folder.exists()


def test_the_observer_logs_one_warning_with_the_path(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        mine.observe(0, 600 * MIB, 512 * MIB, 512 * MIB)
    (record,), (name,), (report,) = caplog.records, names(folder), reports(folder)
    assert record.getMessage().startswith("PyTorch needs 600 MiB on device 0 and has 512 MiB free.")
    assert record.getMessage().endswith(f"Report: {folder / name}")
    assert (report["failure"]["source"], report["failure"]["requested_bytes"]) == ("PyTorch", 600 * MIB)


@pytest.fixture
def slack(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> str:
    """A tag with 2 MiB of slack. A new one: a tag whose slack was in the way once gets no more runs."""
    tag = f"churns {next(_numbers)}"
    with saver.region(tag):
        addresses = [fake_torch.allocate(2 * MIB) for _ in range(RUN_OF_FOUR)]
    saver.pause(tag)
    saver.resume(tag)
    fake_torch.free(addresses[-2])
    saver.empty_cache()
    return tag


def test_the_observer_names_slack(mine: Reporter, folder: Path, slack: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        mine.observe(0, 500 * MIB, 512 * MIB, 496 * MIB)
    (record,), (report,) = caplog.records, reports(folder)
    assert record.getMessage().count("2 MiB of device 0 are slack") == 1
    assert f"(tag '{slack}': 2 MiB). pause(tag, backup=\"host\") and resume(tag) return it" in record.getMessage()
    assert [(row["tag"], row["slack_bytes"]) for row in report["tags"]] == [(slack, 2 * MIB)]
    assert "runs=False" in report["summary"]


def test_a_failed_resume_names_slack_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, mine: Reporter, folder: Path, slack: str
) -> None:
    """The native core does."""
    with saver.region("a"):
        fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        fake_torch.allocate(300 * MIB)
    with pytest.raises(errors.OutOfMemoryError) as caught:
        saver.resume("a")
    text = str(caught.value)
    assert text.count("slack") == 1 and slack in text and "resume(tag) return it" in text


def test_the_observer_says_nothing_without_a_folder(mine: Reporter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torch_memory_saver"):
        mine.observe(0, MIB, MIB, 0)
    assert caplog.records == []


# Failures of the report.


@pytest.mark.parametrize("part", ["_process", "_tags", "_torch", "_settings", "_events", "_stacks"])
def test_a_part_that_fails_is_named_and_the_rest_is_there(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(failure: object) -> None:
        raise RuntimeError("no such luck")

    name = part.removeprefix("_")
    monkeypatch.setitem(content._PARTS, name, fail)
    mine.explain(make_error(), None)
    (report,) = reports(folder)
    assert report[name] is None
    assert report["missing"] == {name: "RuntimeError: no such luck"}
    assert all(report[other] is not None for other in ("process", "tags", "settings", "events") if other != name)
    text = (folder / names(folder)[0]).read_text()
    assert f"Missing in this report\n  {name}: RuntimeError: no such luck\n" in text


def test_a_ledger_that_fails(mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> Any:
        raise errors.DriverError("cuMemGetInfo failed")

    monkeypatch.setattr(account, "take_ledger", fail)
    error = make_error()
    mine.explain(error, ("a",))
    (report,) = reports(folder)
    assert str(error) == f"resume: too little memory.\n- Report: {folder / names(folder)[0]}"
    assert report["missing"] == {"ledger": "RuntimeError: DriverError: cuMemGetInfo failed"}
    assert "Who holds it is not known: DriverError: cuMemGetInfo failed." in report["summary"]
    assert report["device"]["total_bytes"] == 512 * MIB


@pytest.mark.parametrize("raised", [RuntimeError("no"), RecursionError("no"), MemoryError("no")])
def test_nothing_is_raised_and_the_error_is_as_it_was(
    mine: Reporter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
) -> None:
    def fail(*arguments: object) -> Any:
        raise raised

    monkeypatch.setattr(account, "take_account", fail)
    error = make_error()
    mine.explain(error, None)
    mine.observe(0, MIB, MIB, 0)
    assert str(error) == "resume: too little memory."
    assert [record.getMessage() for record in caplog.records] == ["the out-of-memory report failed"] * 2
    assert not folder.exists()


def test_a_log_that_fails_raises_nothing_either(mine: Reporter, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **others: object) -> None:
        raise RuntimeError("the log is broken")

    monkeypatch.setattr(reporter.logger, "warning", fail)
    mine.observe(0, MIB, MIB, 0)
    assert len(names(folder)) == 1


def test_ctrl_c_is_not_kept_from_the_program(mine: Reporter, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(account, "take_account", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mine.observe(0, MIB, MIB, 0)
    monkeypatch.undo()
    mine.write_to(ReportFolder(folder))
    mine.observe(0, MIB, MIB, 0)
    assert len(names(folder)) == 1, "the next one is reported"


def test_text_that_is_no_text_is_written(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a path in the environment that is not UTF-8."""
    monkeypatch.setitem(os.environ, "TMS_DISK_BACKUP_DIR", os.fsdecode(b"/tmp/\xff"))
    mine.explain(make_error("resume: of tag '\udcff', 'größe\x1b[31m'."), ("\udcff",))
    (report,) = reports(folder)
    assert report["failure"]["tags"] == ["\udcff"]
    text = (folder / names(folder)[0]).read_text()
    assert r"TMS_DISK_BACKUP_DIR=/tmp/\udcff" in text
    assert r"'größe\x1b[31m'" in text, "a terminal that shows the file does not obey it"


# Several at once.


def test_an_error_inside_of_a_report_makes_no_other(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: list[str] = []

    def fails_too(failure: object) -> list[Any]:
        monkeypatch.setitem(content._PARTS, "tags", lambda failure: [])  # a report inside would not make a third
        mine.observe(0, MIB, MIB, 0)
        error = make_error()
        mine.explain(error, None)
        inner.append(str(error))
        return []

    monkeypatch.setitem(content._PARTS, "tags", fails_too)
    mine.observe(0, MIB, MIB, 0)
    assert inner == [str(make_error())]
    assert [report["number"] for report in reports(folder)] == [1]
    mine.observe(0, MIB, MIB, 0)
    assert len(names(folder)) == 2


def test_threads_at_once_make_one_each(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 6
    together, real = threading.Barrier(count), content._PARTS["tags"]

    def meet(failure: Any) -> Any:
        together.wait(TIMEOUT_S)
        return real(failure)

    monkeypatch.setitem(content._PARTS, "tags", meet)
    threads = [threading.Thread(target=mine.observe, args=(0, MIB, MIB, 0)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report["number"] for report in reports(folder)) == list(range(1, count + 1))


def test_a_forked_child_begins_again(program: Any, tmp_path: Path) -> None:
    """Also one that was forked while a report was being made."""
    text = """
import json, os, sys
from torch_memory_saver.observe._out_of_memory import content
from torch_memory_saver.observe._out_of_memory.reporter import reporter
module.torch_memory_saver.stats()
reporter.observe(0, 1, 1, 0)
real = content._PARTS["tags"]
def forks(failure):
    content._PARTS["tags"] = real
    if os.fork() == 0:
        reporter.observe(0, 2, 2, 0)
        os._exit(0)
    assert os.wait()[1] == 0
    return real(failure)
content._PARTS["tags"] = forks
reporter.observe(0, 3, 3, 0)
"""
    program(text, TMS_DEBUG="oom", TMS_DEBUG_DIR=str(tmp_path))
    found = sorted(
        (report["number"], report["failure"]["requested_bytes"], report["process"]["pid"])
        for report in reports(tmp_path / "oom")
    )
    assert [row[:2] for row in found] == [(1, 1), (1, 2), (2, 3)]
    assert found[0][2] == found[2][2] != found[1][2]


def test_the_ledger_is_of_the_device_that_ran_out(
    mine: Reporter, folder: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    queried: list[int] = []

    def take(device: int) -> Ledger:
        queried.append(device)
        lines = (LedgerLine("processes", "other processes", 9 * MIB),)
        return Ledger((DeviceLedger(device, 10 * MIB, 9 * MIB, lines),), (), 1, 0.0)

    monkeypatch.setattr(account, "take_ledger", take)
    error = make_error()
    error.device = 1
    mine.explain(error, None)
    assert queried == [1]
    assert "The largest holder of device 1 is other processes: 9 MiB of 10 MiB.\n- Report: " in str(error)
