"""Guards the comparison of engines: their turns, the tokens that make it fail, and failures of an engine's process."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_turns import OURS, add_arguments, compare
from fake_engine import FakeEngine


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the contents of the JSON file."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, ("none", OURS), ("level1", "update"))
    path = tmp_path / "result.json"
    status = compare(FakeEngine, parser.parse_args(["--json", str(path), "--cycles", "3", *arguments]))
    return status, json.loads(path.read_text("utf-8"))


def test_engines_take_turns_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, "--backends", f"none,{OURS},cumem")
    assert status == 0
    assert result["mistakes"] == []
    order = [(row["case"], row["backend"]) for row in result["cycles"]]
    turns = [OURS, "cumem", "cumem", OURS, OURS, "cumem"]
    assert order == [("level1", backend) for backend in turns] + [("update", backend) for backend in turns]
    pids = {row["backend"]: row["details"]["pid"] for row in result["cycles"]}
    assert len({os.getpid(), *pids.values()}) == 3
    table = capfd.readouterr().out
    assert f"| case | figure | {OURS} | cumem | {OURS} / cumem |" in table
    assert "| level1 | first sleep | 100.00 | 100.00 | 1.00 |" in table
    assert "| level1 | sleep | 1.50 [1.00, 2.00] | 1.50 [1.00, 2.00] | 1.00 |" in table


@pytest.mark.parametrize(
    ("backend", "mistakes"),
    [
        ("differs", ["differs begins with tokens other, torch_memory_saver with first"]),
        ("forgets", ["forgets, level1, cycle 1: tokens lost, not first as before"]),
        (
            "stale",
            [
                "stale, update, cycle 2: the tokens are those of before the update",
                "stale, update, cycle 2: tokens first, not new 2 as another backend",
            ],
        ),
        ("broken", ["RuntimeError: no such backend"]),
        ("dies", ["cycle('level1', 1) failed: its process ended"]),
    ],
)
def test_a_mistake_of_an_engine_fails_the_comparison(backend: str, mistakes: list[str], tmp_path: Path) -> None:
    status, result = run(tmp_path, "--backends", f"{OURS},{backend}")
    assert status == 1
    for mistake in mistakes:
        assert any(mistake in each for each in result["mistakes"]), result["mistakes"]
    assert {OURS} <= {row["backend"] for row in result["cycles"]}, "the other engine goes on"


def test_host_memory_is_touched_before_the_engines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, "--backends", OURS, "--warm-host", "0.01")
    assert status == 0
    assert "GiB touched" in capfd.readouterr().out
