"""Guards ``python -m torch_memory_saver bench``, at a small size on the simulated GPU: every case works, and failures are
reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import Program

import torch_memory_saver
from torch_memory_saver._bench import command as bench
from torch_memory_saver._bench import savers
from torch_memory_saver._bench.cases import CASES, find
from torch_memory_saver.errors import InvalidArgumentError

#: Each starts programs.
pytestmark = pytest.mark.slow

#: Cases that need PyTorch's allocator.
OF_TORCH = {"decode", "live-torch", "model", "preserve", "send", "snapshot", "synchronise"}

#: A package of the same name, with as much of its API as the C++ package has had in every release.
PEER = """
from contextlib import contextmanager
calls = []
class Saver:
    hook_mode = None
    @contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        assert self.hook_mode == "torch"
        yield
    def pause(self, tag=None):
        calls.append("pause")
    def resume(self, tag=None):
        calls.append("resume")
torch_memory_saver = Saver()
print("something on stdout")
"""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a package of the same name is installed."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "torch_memory_saver").mkdir()
    (folder / "torch_memory_saver" / "__init__.py").write_text(PEER)
    (folder / "torch_memory_saver-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch-memory-saver\nVersion: 9.9\n"
    (folder / "torch_memory_saver-9.9.dist-info" / "METADATA").write_text(metadata)
    return folder


@pytest.mark.slow
def test_every_case(command: Program, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = command("bench", "--device", "simulated", "--repetitions", "1", "--json", str(path), "--directory", str(tmp_path))
    data = json.loads(path.read_text())
    measured = {row["case"] for row in data["rows"]}
    left_out = {entry["case"] for entry in data["left_out"]}
    assert measured | left_out == {case.name for case in CASES}
    assert left_out <= OF_TORCH, data["left_out"]
    assert data["machine"]["simulated"] is True
    assert data["machine"]["device"]
    assert data["peer"] is None
    for row in data["rows"]:
        assert row["ours"]["values"], row
        assert row["ours"]["min"] <= row["ours"]["median"] <= row["ours"]["max"]
        assert (row["limit"] is None) == (row["ratio"] is None)
        assert row["limit"] is not None or row["operation"] == "both", row
        assert (row["met"] is None) == (row["ratio"] is None or row["target"]["value"] is None)
        if row["unit"] == "seconds" and row["bytes"]:
            assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["ours"]["median"])
    assert {row["operation"] for row in data["rows"] if row["case"] == "pooled"} == {
        *("pause", "resume", "pause parity", "resume parity", "pause bare", "resume bare", "resume at once"),
    }
    assert {row["operation"] for row in data["rows"] if row["case"] == "cycles"} == {
        *("allocate", "first pause", "first resume", "pause", "resume", "first vs later"),
    }
    firsts = {row["operation"]: row for row in data["rows"] if row["case"] == "first" and row["limit"] is not None}
    assert {"pause", "pause bare", "pause staged"} <= set(firsts)
    assert firsts["pause bare"]["ours"] == firsts["pause"]["ours"]
    assert len(firsts["pause bare"]["limit"]["values"]) == len(firsts["pause"]["limit"]["values"])
    assert "On the simulated GPU times mean nothing" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert all(f"{case.name}: {case.title}" in done.stdout for case in CASES if case.name in measured)
    assert "] dropped, 1 x " in done.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_some_cases_as_markdown(command: Program) -> None:
    arguments = ("bench", "--device", "simulated", "--cases", "region, host-memory", "--repetitions", "2", "--markdown")
    lines = command(*arguments).stdout.splitlines()
    assert lines[2].startswith("| case |")
    names = [line.split("|")[1].split(",")[0].strip() for line in lines[4:]]
    assert [name for name in names if name] == ["region", "host-memory"], "in the order that was asked for"


def test_host_memory_is_allocated_and_released(command: Program, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command("bench", "--device", "simulated", "--cases", "host-memory", "--repetitions", "2", "--json", str(path))
    rows = {row["operation"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {f"{backup}: {when}" for backup in ("pinned", "mmap") for when in ("peak", "after")}
    for backup in ("pinned", "mmap"):
        peak, after = rows[f"{backup}: peak"], rows[f"{backup}: after"]
        size = peak["limit"]["median"]
        assert peak["ours"]["min"] >= 0.9 * size, "the backups were not seen"
        assert peak["met"] and after["met"], (peak, after)
        assert len(peak["ours"]["values"]) == 2


def test_slack_under_churn(command: Program, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command("bench", "--device", "simulated", "--cases", "slack,churn", "--repetitions", "2", "--json", str(path))
    data = json.loads(path.read_text())
    assert data["left_out"] == []
    slack, *churn = data["rows"]
    assert (slack["case"], slack["operation"], slack["limit"]["values"]) == ("slack", "allocate", [2e-6])
    assert len(slack["ours"]["values"]) == 2
    rows = {row["operation"]: row for row in churn}
    counts = {name: len(row["ours"]["values"]) for name, row in rows.items()}
    assert counts == {"after frees": 2, "held": 2, "after the pause": 8, "later cycles": 8}
    freed = rows["after frees"]["limit"]["median"]
    assert freed > 0
    assert set(rows["after frees"]["ours"]["values"]) == {freed}
    assert set(rows["held"]["ours"]["values"]) == {freed}, "on the simulated GPU handles need nothing else"
    assert {*rows["after the pause"]["ours"]["values"], *rows["later cycles"]["ours"]["values"]} == {0}
    assert all(row["met"] for name, row in rows.items() if name != "held")


def test_few_large_handles_beside_a_peer(command: Program, peer: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("bench", "--device", "simulated", "--cases", "cycles", "--repetitions", "2", "--peer", str(peer))
    done = command(*arguments, "--json", str(path))
    rows = {row["operation"]: row for row in json.loads(path.read_text())["rows"]}
    for operation in ("pause", "resume"):
        timed, beside = rows[operation], rows[f"{operation} C++"]
        assert (timed["target"]["value"], beside["target"]["value"]) == (1.5, 5.0)
        assert beside["ours"] == timed["ours"]
        assert beside["limit"] == timed["peer"]
        assert [len(timed[side]["values"]) for side in ("ours", "limit", "peer")] == [4, 4, 4], "of two processes"
    for operation in ("allocate", "first pause", "first resume", "first vs later"):
        assert rows[operation]["target"]["value"] is None
        assert [len(rows[operation][side]["values"]) for side in ("ours", "peer")] == [2, 2]
    assert "4 handles of 67108864 bytes before the first pause" in rows["pause"]["notes"]
    assert "limit of C++: the C++ package" in done.stdout


@pytest.mark.slow
def test_with_a_peer(command: Program, peer: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("bench", "--device", "simulated", "--cases", "release,pooled,retained,disk", "--repetitions", "1")
    done = command(*arguments, "--peer", str(peer), "--json", str(path))
    data = json.loads(path.read_text())
    assert data["peer"] == "9.9"
    for row in data["rows"]:
        expected = row["case"] == "release" and "parity" not in row["operation"]
        assert (row["peer"] is not None) == expected, row
        assert (row["peer_ratio"] is not None) == expected
    reasons = {entry["case"]: entry["reason"] for entry in data["left_out"]}
    assert reasons == {
        "retained": "it does not retain backups",
        "disk": "it has no disk backups",
    }
    assert "C++: torch_memory_saver 9.9" in done.stdout
    assert "something on stdout" not in done.stdout
    assert "something on stdout" in done.stderr


def test_former_runs_are_shown_together(command: Program, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    arguments = ("bench", "--device", "simulated", "--repetitions", "1", "--cases")
    measured = command(*arguments, "allocate", "--json", str(first)).stdout
    assert command("bench", "--from", str(first)).stdout.splitlines()[3:] == measured.splitlines()[3:]
    command(*arguments, "import", "--json", str(second))
    together = command("bench", "--from", str(first), "--from", str(second), "--markdown").stdout
    assert "| allocate, " in together
    assert "| import, once |" in together
    first.write_text("[]")
    for path in (first, tmp_path / "none"):
        assert "cannot be read as a file that bench --json wrote" in command("bench", "--from", str(path), status=1).stderr


def test_a_peer_that_fails_is_left_out(command: Program, peer: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    for source in peer.rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            target = broken / source.relative_to(peer)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text())
    package = broken / "torch_memory_saver" / "__init__.py"
    package.write_text(PEER.replace('calls.append("resume")', "import os; os._exit(3)"))
    done = command("bench", "--device", "simulated", "--cases", "release", "--repetitions", "1", "--peer", str(broken))
    assert "(C++): the process ended with status 3" in " ".join(done.stdout.split())
    assert "  resume" in done.stdout


def test_a_failure_of_ours_is_one(command: Program) -> None:
    arguments = ("bench", "--device", "simulated", "--cases", "region,mmap", "--repetitions", "1")
    done = command(*arguments, status=1, TMS_SIMULATED_FAULT="cuMemHostRegister:0:1000:2,cuMemcpyDtoHAsync:0:1000:1")
    assert "mmap" in done.stdout.partition("Left out:")[2]
    assert "little memory in use" in done.stdout, "the other case ran"
    assert "Traceback" in done.stderr


def test_refusals(command: Program, tmp_path: Path) -> None:
    for arguments, words in {
        ("--cases", "dropped,nonsense"): "there is no case 'nonsense': choose from dropped,",
        ("--cases", ","): "no case is given",
        ("--scale", "2"): "'2' is not a number from 0.00195 to 1",
        ("--scale", "nan"): "is not a number from",
        ("--scale", "-1"): "is not a number from",
        ("--repetitions", "0"): "'0' is not a whole number of at least 1",
        ("--repetitions", "x"): "is not a whole number of at least 1",
        ("--device", "other"): "invalid choice",
    }.items():
        assert words in command("bench", *arguments, status=2).stderr
    for arguments, words in {
        ("--peer", str(tmp_path)): f"there is no torch_memory_saver in {tmp_path}: install one there",
        ("--json", str(tmp_path / "no" / "such" / "folder")): "cannot be written",
        ("--json", str(tmp_path)): "cannot be written",
        ("--directory", str(tmp_path / "no")): "is not a folder",
    }.items():
        done = command("bench", "--device", "simulated", *arguments, status=1)
        assert words in done.stderr
        assert "[1/" not in done.stderr, "it began to measure"
        assert done.stdout == ""


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, command: Program) -> None:
    if bench.GpuMachine.is_available():
        pytest.skip("PyTorch finds a GPU")
    assert "bench finds no GPU" in command("bench", "--device", "gpu", status=1).stderr
    assert "running on the simulated GPU" in command("bench", "--cases", "import", "--repetitions", "1").stderr


def test_a_scale_for_a_gpu_is_too_large_for_the_simulated_one(command: Program, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--scale", "0.1", "--cases", "dropped", "--repetitions", "1", "--json", str(path))
    done = command("bench", *arguments, CUDA_VISIBLE_DEVICES="")
    assert "sizes are multiplied by 0.00195, not by 0.1" in done.stderr
    assert "Left out" not in done.stdout
    data = json.loads(path.read_text())
    assert data["scale"] == 1 / 512
    assert {(entry["case"], entry["operation"]) for entry in data["rows"]} == {("dropped", "pause"), ("dropped", "resume")}
    assert not re.search(r"x (ok|NO)", done.stdout)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started = []

    def start(machine: object, peer: object, job: dict[str, Any]) -> dict[str, Any]:
        started.append(job["case"])
        if len(started) == 2:
            raise KeyboardInterrupt
        return {"unavailable": "a reason"}

    monkeypatch.setattr(bench, "_start", start)
    chosen = [find("region"), find("import"), find("mmap")]
    options = bench.Options(cases=[case for case in chosen if case is not None], device="simulated")
    assert bench.run(options) == 130
    assert started == ["region", "import"]
    assert "region, once (ours): a reason" in capsys.readouterr().out


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.title and case.shapes and case.repetitions > 0 for case in CASES)
    assert find("nonsense") is None


def test_without_a_compiler_there_is_no_limit(command: Program, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = "dropped,cycles,pooled,wake-up,allocate,slack,churn"
    arguments = ("bench", "--device", "simulated", "--cases", chosen, "--repetitions", "1")
    command(*arguments, "--json", str(path), CC="/nonexistent/cc")
    data = json.loads(path.read_text())
    rows = [row for row in data["rows"] if row["operation"] != "first vs later"]
    without = {(row["case"], row["operation"]) for row in rows if "no limit: the C compiler" in row["notes"]}
    assert without == {
        *(("dropped", "pause"), ("dropped", "resume"), ("wake-up", "resume kv_cache")),
        *(("cycles", operation) for operation in ("allocate", "first pause", "first resume", "pause", "resume")),
        *(("pooled", "pause bare"), ("pooled", "resume bare"), ("pooled", "resume at once")),
    }
    assert all(row["limit"] is None for row in rows if (row["case"], row["operation"]) in without)
    assert [entry["case"] for entry in data["left_out"]] == ["allocate", "slack", "churn"]


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(savers.Unavailable, match="python found"):
        savers.Peer(str(tmp_path))
    assert torch_memory_saver.torch_memory_saver is not None


def test_files_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        bench.run(bench.Options(cases=[], json_path=str(tmp_path / "no" / "file")))
