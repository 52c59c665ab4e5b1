"""Guards the cases of benchmarks/ at a small size: each measures both sides and finds the contents that it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import torch_programs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cases  # noqa: E402
import limits  # noqa: E402
import run  # noqa: E402
from setting import MIB, SMALLEST_SCALE, Block, WrongContents  # noqa: E402

import torch_memory_saver  # noqa: E402


def measure(name: str, directory: Path, shape: int = 0) -> list[dict[str, object]]:
    job = {
        "case": name,
        "shape": shape,
        "scale": SMALLEST_SCALE,
        "peer": None,
        "repetitions": 2,
        "directory": str(directory),
    }
    rows: list[dict[str, object]] = run.measure(job)["rows"]
    torch_memory_saver.empty_cache()
    return rows


@pytest.mark.parametrize("name", [case.name for case in cases.CASES])
def test_a_case(name: str, tmp_path: Path) -> None:
    rows = measure(name, tmp_path)
    expected = {
        "first": {"pause", "resume", "pause, bare"},
        "pooled": {"pause", "resume", "pause, bare", "resume, bare", "resume at once"},
        "retained": {"pause", "resume", "resume at once"},
        "changes": {"fingerprints", "pause, nothing changed", "before the release", "pause, 5 % changed"},
        "allocate": {"allocate", "free"},
        "region": {"little memory in use", "GPU mostly in use"},
        "import": {"torch imported"},
    }
    assert {row["operation"] for row in rows} == expected.get(name, {"pause", "resume"})
    for row in rows:
        assert len(row["ours"]) == (1 if name == "first" else 2), row
        # The simulated GPU has no kernel that only reads.
        assert row["limit"] or row["operation"] == "fingerprints", row
    assert list(tmp_path.iterdir()) == []


def test_what_changes_is_copied(tmp_path: Path) -> None:
    """All contents in the case `retained`; in `changes` nothing, and then at least a chunk."""
    for name, unchanged in (("retained", False), ("changes", True)):
        before = torch_memory_saver.torch_memory_saver.stats().counters
        measure(name, tmp_path)
        after = torch_memory_saver.torch_memory_saver.stats().counters
        difference = after["pause_unchanged_bytes_total"] - before["pause_unchanged_bytes_total"]
        assert (difference > 0) == unchanged, name


def test_small_blocks_are_compared_with_large_handles(tmp_path: Path) -> None:
    rows = measure("dropped", tmp_path, shape=2)
    assert {row["limit_name"] for row in rows} == {"bare driver calls on handles of 64 MiB"}, "4 x 16 MiB in one handle"


def test_without_a_compiler_there_is_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc")
    limits._compiled.cache_clear()
    for row in measure("dropped", tmp_path):
        assert row["limit_name"].startswith("no limit: the C compiler /nonexistent/cc could not be started")
        assert not row["limit"]
    with pytest.raises(cases.Unavailable, match="/nonexistent/cc"):
        measure("allocate", tmp_path)


def test_wrong_contents_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "fill", lambda block: block.device.fill(block.address, block.size, block.value ^ 1))
    with pytest.raises(WrongContents, match="retained: block 0 of 2 does not hold what was written to it"):
        measure("retained", tmp_path)


def test_the_last_bare_handle_has_the_rest() -> None:
    device = limits.Device()
    free, _ = device.memory()
    bare = limits.BareAllocations(5 * MIB * 2, 4 * MIB)
    bare.resume()
    assert free - device.memory()[0] == 10 * MIB, "two handles of 4 MiB and one of 2"
    bare.pause()
    bare.close()
    assert device.memory()[0] == free


def test_the_program(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--cases", "retained", "--repetitions", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert {(row["case"], row["shape"]) for row in data["rows"]} == {("retained", "2 x 16 MiB"), ("retained", "2 x 12 MiB")}
    assert data["machine"]["simulated"] is True
    assert data["machine"]["torch"] == str(torch.__version__)
    assert done.stdout.startswith("This is the simulated GPU")
    assert "retained, 2 x 12 MiB" in done.stdout


def result_of(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program of benchmarks/ at its small size and return the JSON object that it prints."""
    process = torch_programs.start([str(BENCHMARKS / program), "--small", *arguments], os.environ, BENCHMARKS)
    output, error = process.communicate(300)
    assert process.returncode == 0, error
    result: dict[str, Any] = json.loads(output)
    return result


OTHER_SIDE = [pytest.param(setting, marks=pytest.mark.slow) for setting in ("ordinary", "expandable")]


@pytest.mark.parametrize("setting", ["managed", "managed-expandable", *OTHER_SIDE])
def test_a_fragmented_training(setting: str) -> None:
    result = result_of("fragmented_training.py", "--setting", setting)
    assert result["mode"] == setting
    assert 0 < result["live_gib"] <= result["allocated_peak_gib"] <= result["reserved_peak_gib"]
    if not setting.startswith("managed"):
        assert "same" not in result
        return
    assert result["same"] is True, "the parameters have changed"
    paused = result["used_paused_gib"]
    assert len(paused) == len(result["pause_ms"]) == len(result["resume_ms"]) == 4
    assert max(paused) < result["used_end_gib"], "a pause releases memory"


@pytest.mark.parametrize("mode", ["ordinary", "region", "line", "manage"])
def test_the_peak_while_weights_are_managed(mode: str) -> None:
    result = result_of("manage_peak.py", "--mode", mode)
    live, largest = result["live_gib"], result["largest_mib"] / 1024
    assert result["mode"] == mode
    assert (live, largest) == (6 / 64, 1 / 64), "6 layers of 16 MiB"
    if mode != "manage":
        assert result["peak_gib"] >= live
        return
    assert result["moved_gib"] == live
    assert result["load_peak_gib"] >= live
    assert 0 < result["peak_gib"] <= live + largest + 64 / 1024
