"""Guards out-of-memory reports: one for each error that reaches the program, with who holds the memory, and nothing else of
the error or of the program changes."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    GIB,
    LARGE,
    MIB,
    SIMULATED,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    saver,
    segment_of,
    state_of,
    take_all_but,
    torch,
)
from second_process import SecondProcess

MORE_THAN_ANY_GPU = 1024 * GIB
#: What the second process leaves free: other processes may use the GPU a little.
LEFT = LARGE if SIMULATED else 4 * GIB


class Reports:
    """The reports of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def texts(self) -> list[Path]:
        return sorted(self.folder.glob("*.txt"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))

    def only(self) -> dict[str, Any]:
        """The data of the only report, which is complete."""
        (text,) = self.texts
        assert sorted(self.folder.iterdir()) == sorted([text, text.with_name(f"{text.stem}.json")])
        report: dict[str, Any] = json.loads(text.with_name(f"{text.stem}.json").read_text())
        assert report["missing"] == {}
        assert report["summary"].split() == text.read_text().split("\n\n")[1].split()
        (ledger,) = report["ledger"]["devices"]
        assert sum(line["bytes"] or 0 for line in ledger["lines"]) == ledger["used_bytes"]
        assert report["device"] == {
            "device": 0,
            "free_bytes": ledger["total_bytes"] - ledger["used_bytes"],
            "total_bytes": torch.cuda.mem_get_info()[1],
        }
        return report


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    """Reports to a folder that does not exist yet, as TMS_DEBUG=oom begins them."""
    from torch_memory_saver.observe._out_of_memory.reporter import reporter, start_reports

    saver.pause()  # the first use
    start_reports(str(tmp_path / "reports"))
    yield Reports(tmp_path / "reports")
    reporter.write_to(None)


def path_in(error: BaseException) -> Path:
    """The path that the message of an error names."""
    found = re.search(r" Report: (\S+\.txt)$", str(error))
    assert found is not None, error
    return Path(found[1])


def line_of(report: dict[str, Any], holder: str) -> int:
    return sum(line["bytes"] or 0 for line in report["ledger"]["devices"][0]["lines"] if line["holder"] == holder)


def paused_weights(size: int) -> torch.Tensor:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(size)
    fill_random(weights, 1)
    saver.pause("weights")
    return weights


def test_a_resume_while_a_second_process_holds_the_memory(reports: Reports) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(2 * LEFT)
    fill_random(weights, 1)
    expected = checksum(weights)
    saver.pause("weights")
    with SecondProcess() as other:
        other.do("hold", LEFT)
        with pytest.raises(errors.OutOfMemoryError) as caught:
            saver.resume("weights")
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert re.search(r" The largest holder of device 0 is other processes.*: [\d.]+ [MG]iB of ", str(caught.value))
        if SIMULATED:  # NVML names this process, which has no memory now, and the other one. No package is needed.
            assert f"(pid {other.pid}, " in str(caught.value)
        report = reports.only()
        assert path_in(caught.value) == reports.texts[0]
        assert state_of(weights) == core.STATE_PAUSED
        other.do("give_back")
        assert saver.resume("weights").allocations == 1
    assert checksum(weights) == expected
    failure = report["failure"]
    assert (failure["source"], failure["operation"], failure["device"]) == ("torch_memory_saver", "resume", 0)
    assert failure["tags"] == ["weights"]
    assert failure["needed_bytes"] == segment_of(weights).reserved_bytes
    assert failure["driver_call"] == "cuMemCreate"
    assert report["device"]["free_bytes"] < failure["needed_bytes"]
    assert line_of(report, "processes") > report["device"]["total_bytes"] // 2
    (row,) = report["tags"]
    assert (row["tag"], row["device"], row["resident_bytes"]) == ("weights", 0, 0)
    assert row["paused_bytes"] >= row["backup_bytes"] == 2 * LEFT
    end = report["events"]["events"][-1]
    assert (end["kind"], end["operation"], end["status"]) == ("end", "resume", "OUT_OF_DEVICE_MEMORY")
    assert "resume(timeout=seconds)" in report["summary"]
    assert report["process"]["hook_mode"] == ("preload" if core.preloaded else "torch")


def test_a_resume_with_a_timeout_makes_one_report_at_its_end(reports: Reports) -> None:
    weights = paused_weights(4 * LARGE)
    other = take_all_but(LARGE)
    with pytest.raises(errors.OutOfMemoryError, match=r"missing after \d+\.\d seconds"):
        saver.resume("weights", timeout=0.2)
    report = reports.only()
    assert report["failure"]["needed_bytes"] == 4 * LARGE
    assert line_of(report, "torch") >= other.numel()
    assert state_of(weights) == core.STATE_PAUSED


def test_a_resume_for_which_the_cache_is_emptied_makes_none(reports: Reports) -> None:
    weights = paused_weights(4 * LARGE)
    assert take_all_but(LARGE).numel() > 0  # cached now
    assert saver.resume("weights").allocations == 1
    assert not reports.folder.exists()
    del weights


def test_a_resume_in_the_background_makes_one_however_often_it_is_awaited(reports: Reports) -> None:
    weights = paused_weights(4 * LARGE)
    other = take_all_but(LARGE)
    pending = saver.resume("weights", wait=False)
    messages = []
    for wait in (pending.wait, pending.wait_stream, pending.wait):
        with pytest.raises(errors.OutOfMemoryError) as caught:
            wait()
        messages.append(path_in(caught.value))
    assert messages == [reports.texts[0]] * 3
    assert reports.only()["failure"]["tags"] == ["weights"]
    del other, weights


@pytest.mark.parametrize("in_region", [True, False])
def test_pytorchs_own_error_keeps_its_text_and_the_log_has_the_path(
    reports: Reports, caplog: pytest.LogCaptureFixture, in_region: bool
) -> None:
    kept = empty(4 * MIB)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"), pytest.raises(torch.OutOfMemoryError) as caught:
        if in_region:
            with saver.region(tag="cache"):
                empty(MORE_THAN_ANY_GPU)
        else:
            empty(MORE_THAN_ANY_GPU)
    assert not isinstance(caught.value, errors.OutOfMemoryError)
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate")
    report = reports.only()
    (record,) = (each for each in caplog.records if each.name == "torch_memory_saver")
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f" Report: {reports.texts[0]}")
    failure = report["failure"]
    assert (failure["source"], failure["operation"]) == ("PyTorch", "allocate")
    assert failure["requested_bytes"] == failure["needed_bytes"] == MORE_THAN_ANY_GPU
    assert failure["tags"] == (["cache"] if in_region else [])
    assert "more than the whole memory of the device" in report["summary"]
    assert report["torch"]["allocated_bytes"] >= kept.numel()


def test_other_observers_stay_and_ours_is_attached_once(reports: Reports) -> None:
    from torch_memory_saver.observe._out_of_memory.reporter import attach_observer, start_reports

    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: seen.append(numbers))
    start_reports(str(reports.folder))
    attach_observer(torch._target())  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError):
        empty(MORE_THAN_ANY_GPU)
    assert len(seen) == 1
    assert seen[0][:2] == (0, MORE_THAN_ANY_GPU)
    assert reports.only()["number"] >= 1
    seen.clear()


def test_other_threads_allocate_while_a_report_is_made(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch holds no lock of its allocator while it calls observers."""
    from torch_memory_saver.observe._out_of_memory import content

    made: list[int] = []

    def allocate() -> None:
        with saver.region(tag="beside"):
            made.append(empty(2 * MIB).numel())

    def beside(*arguments: Any) -> dict[str, Any]:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        return collect(*arguments)

    collect = content.collect
    monkeypatch.setattr(content, "collect", beside)
    with pytest.raises(torch.OutOfMemoryError):
        empty(MORE_THAN_ANY_GPU)
    assert made == [2 * MIB]
    assert len(reports.texts) == 1


def test_an_error_while_a_report_is_made_is_not_reported(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_memory_saver.observe._out_of_memory import content

    def allocating(*arguments: Any) -> dict[str, Any]:
        with pytest.raises(torch.OutOfMemoryError):
            empty(MORE_THAN_ANY_GPU)
        return collect(*arguments)

    collect = content.collect
    monkeypatch.setattr(content, "collect", allocating)
    with pytest.raises(torch.OutOfMemoryError):
        empty(MORE_THAN_ANY_GPU)
    reports.only()


def test_a_failed_write_changes_nothing_about_the_error(tmp_path: Path, reports: Reports) -> None:
    from torch_memory_saver.observe._out_of_memory.folder import ReportFolder
    from torch_memory_saver.observe._out_of_memory.reporter import reporter

    (tmp_path / "file").write_text("")
    folder = ReportFolder(tmp_path / "file" / "reports")
    reporter.write_to(folder)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        empty(MORE_THAN_ANY_GPU)
    weights = paused_weights(4 * LARGE)
    other = take_all_but(LARGE)
    with pytest.raises(errors.OutOfMemoryError, match="The largest holder of device 0 is") as caught:
        saver.resume("weights")
    assert "Report" not in str(caught.value)
    assert folder.failures == 2
    assert (tmp_path / "file").read_text() == ""
    del other
    torch.cuda.empty_cache()
    assert saver.resume("weights").allocations == 1
    del weights


def test_a_capture_stays_valid(reports: Reports) -> None:
    number = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        number += 1
        with pytest.raises(torch.OutOfMemoryError):
            empty(MORE_THAN_ANY_GPU)
        number += 1
    number.zero_()
    graph.replay()
    assert number.tolist() == [2.0] * 4
    assert reports.only()["process"]["visible_captures"] == 1


def test_the_call_stacks_that_hold_most(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_memory_saver._torch.binding import history
    from torch_memory_saver.observe import memory

    monkeypatch.setattr(history, "_recorder", history._Recorder())  # other tests may have recorded C++ frames
    memory.record_history(1000)
    try:
        small = empty(4 * MIB)
        large = empty(LARGE)
        paused = paused_weights(2 * LARGE)
        with pytest.raises(torch.OutOfMemoryError):
            empty(MORE_THAN_ANY_GPU)
    finally:
        memory.stop_history()
    stacks = reports.only()["stacks"]
    assert stacks["note"] == ""
    sizes = [row["bytes"] for row in stacks["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    ours = [row for row in stacks["rows"] if any(str(__file__) in frame for frame in row["frames"])]
    assert ours[0]["bytes"] == large.numel(), "what is paused holds no memory"
    assert ours[0]["frames"][0].endswith("empty")
    assert small.numel() in [row["bytes"] for row in ours]
    del paused


def test_stacks_with_native_frames_are_not_read(reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would start the program addr2line."""
    started = tmp_path / "started"
    (tmp_path / "addr2line").write_text(f"#!/bin/sh\necho >> {started}\nexit 1\n")
    (tmp_path / "addr2line").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    torch.cuda.memory._record_memory_history(stacks="all")
    try:
        kept = empty(LARGE)
        with pytest.raises(torch.OutOfMemoryError):
            empty(MORE_THAN_ANY_GPU)
        report = reports.only()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert not started.exists()
    assert report["stacks"]["rows"] == []
    assert "C++ frames" in report["stacks"]["note"]
    assert line_of(report, "torch") >= kept.numel(), "from PyTorch's counters"


@pytest.mark.outer
def test_a_program_that_is_not_changed(tmp_path: Path) -> None:
    """TMS_DEBUG=oom alone, in both hook modes: nothing at import, one report for each error, in children as well."""
    folders = {mode: tmp_path / mode / "oom" for mode in ("torch", "preload")}
    for mode, folder in folders.items():  # one after the other, because each takes all memory
        variables = (("TMS_DEBUG", "oom"), ("TMS_DEBUG_DIR", str(folder.parent)), ("RANK", "5"))
        (done,) = run_programs([Program("out_of_memory.py", environment=variables, preload=mode == "preload")])
        lines = done.check().output.splitlines()
        pid, child = lines[0].split()
        assert lines[1:] == ["torch", "torch", "ours", "torch"]
        names = sorted(path.name for path in folder.glob("*.json"))
        assert [name.split("-", 2)[2] for name in names] == [
            *(f"rank5-pid{pid}-{number}.json" for number in (1, 2, 3)),
            f"rank5-pid{child}-1.json",
        ]
        found = [json.loads((folder / name).read_text()) for name in names]
        assert [report["failure"]["operation"] for report in found] == ["allocate", "allocate", "resume", "allocate"]
        assert [report["failure"]["tags"] for report in found] == [["weights"], [], ["weights"], []]
        assert all(report["missing"] == {} and report["process"]["hook_mode"] == mode for report in found)
        assert all((path.stat().st_mode & 0o777) == 0o600 for path in folder.iterdir())
        assert str(folder / names[2].replace(".json", ".txt")) in done.error


def test_a_limit_that_paused_memory_counts_against_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    total = torch.cuda.mem_get_info()[1]
    with saver.region(tag="engine"):
        engine = empty(LARGE)
    torch.cuda.set_per_process_memory_fraction((LARGE + LARGE // 2) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            empty(LARGE)
        assert "set_per_process_memory_fraction" not in caplog.text, "nothing is paused"
        saver.pause("engine")
        with pytest.raises(torch.OutOfMemoryError):
            empty(LARGE)
        assert caplog.text.count("Its paused memory counts against that limit as well.") == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    caplog.clear()
    with pytest.raises(torch.OutOfMemoryError):
        empty(MORE_THAN_ANY_GPU)
    assert "set_per_process_memory_fraction" not in caplog.text, "no limit is set"
    saver.resume("engine")
    del engine
