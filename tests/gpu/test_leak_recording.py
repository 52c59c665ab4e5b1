"""Guards the way from a program to the line that leaks: `run --record snapshots,history`, then `compare`. A leak is found
whatever the number of pauses in a step and whatever its rhythm. A cache that has filled is a warm-up. The guide shows what
the commands print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from document_blocks import REPOSITORY, read
from gpu_support import SIMULATED

pytestmark = pytest.mark.timeout(200)

SECONDS = 180
MIB = 1 << 20
#: A loop with pauses. `PAUSES` is a list of tags for each step, `KEPT` the steps after which a block of 4 MiB stays.
PROGRAM = """
import torch
from torch_memory_saver import torch_memory_saver as saver

tags = ["kv_cache", "draft", "weights", "gradients", "optimizer"]
memory = {}
for tag in tags:
    with saver.region(tag=tag, backup="host"):
        memory[tag] = torch.ones(1 << 18, device="cuda")
kept = []
for step, pauses in enumerate(PAUSES):
    for tag in pauses:
        activations = [torch.ones(1 << 20, device="cuda") for _ in range(1 + step % 3)] if tag == pauses[0] else []
        saver.pause(tag)
        del activations
    saver.resume()
    if step in KEPT:
        kept.append(torch.ones(1 << 20, device="cuda"))
"""
TWO, FIVE = ["kv_cache", "weights"], ["kv_cache", "draft", "weights", "gradients", "optimizer"]
UNEVEN = [[*TWO, *(["kv_cache"] if step % 5 == 4 else [])] for step in range(12)]


def recorded(program: Path) -> Path:
    """Run a program, and return the folder of its snapshots."""
    folder = program.parent / "debug"
    recording = ["run", "--record", "snapshots,history", "--directory", str(folder), "--"]
    command = [sys.executable, "-m", "torch_memory_saver", *recording, sys.executable, str(program)]
    subprocess.run(command, check=True, timeout=SECONDS)
    return folder / "snapshots"


def compare(snapshots: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_memory_saver", "compare", str(snapshots), *options]
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False, env=environment)


def compared(pauses: list[list[str]], kept: list[int], folder: Path) -> tuple[int, dict[str, Any]]:
    """Run the program and `compare`. Return the exit status of `compare --fail-on-leak` and its findings."""
    program = folder / "loop.py"
    program.write_text(f"PAUSES, KEPT = {pauses!r}, {kept!r}\n{PROGRAM}", encoding="utf-8")
    done = compare(recorded(program), "--fail-on-leak", "--json")
    return done.returncode, json.loads(done.stdout)


def without_places(text: str) -> str:
    """An output without what differs from run to run: the numbers of processes, folders, and where lines end."""
    return " ".join(re.sub(r"\S*/(?=train.py:)", "", re.sub(r"pid \d+", "pid", text)).split())


@pytest.mark.parametrize(
    ("pauses", "kept"),
    [([FIVE] * 12, list(range(0, 12, 3))), (UNEVEN, list(range(0, 12, 2)))],
    ids=["five pauses, each third step", "uneven pauses, each second step"],
)
def test_a_leak_is_found_with_its_line_and_bytes(pauses: list[list[str]], kept: list[int], tmp_path: Path) -> None:
    status, found = compared(pauses, kept, tmp_path)
    (leak,) = found["leaks"]
    frame = leak["stack"]["frames"][0]
    line = (tmp_path / "loop.py").read_text(encoding="utf-8").splitlines()[frame["line"] - 1]
    assert (status, Path(frame["filename"]).name, line.strip()[:11]) == (1, "loop.py", "kept.append")
    changes = [after - before for before, after in zip(leak["bytes"], leak["bytes"][1:], strict=False)]
    assert set(changes) - {0} == {4 * MIB}


def test_a_cache_that_fills_is_a_warm_up_and_activations_are_nothing(tmp_path: Path) -> None:
    status, found = compared([TWO] * 10, [0, 1, 2], tmp_path)
    assert (status, found["leaks"]) == (0, [])
    (warm_up,) = found["warm_ups"]
    assert warm_up["growth"] == 12 * MIB


@pytest.mark.skipif(not SIMULATED, reason="the guide shows the figures of the simulated GPU")
def test_the_guide_shows_what_its_commands_print(tmp_path: Path) -> None:
    guide = REPOSITORY / "docs" / "guides" / "finding-leaks.md"
    program = next(program for program in read(guide)[0] if "train.py" in program.files)
    (tmp_path / "train.py").write_text(program.files["train.py"], encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None
    printed = compare(recorded(tmp_path / "train.py")).stdout
    assert without_places(printed) == without_places(shown[1])
    (line,) = re.findall(r"at \S*train\.py:(\d+) rollout", printed)
    assert "answers.append" in program.files["train.py"].splitlines()[int(line) - 1]
