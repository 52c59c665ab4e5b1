"""Guards the comparison of PyTorch's own snapshots: of a program with planted problems, only the leak and the
fragmentation are reported, with the functions that caused them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support import MIB, REPOSITORY

from torch_memory_saver.observe.memory import Comparison, compare, load_snapshot
from torch_memory_saver.observe.memory.comparison import StackGrowth

RECORDER = REPOSITORY / "tools" / "record_snapshots.py"
SECONDS = 100
#: What PyTorch writes of this program, at most, in bytes.
LARGEST_FILE = 100_000


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a recording, in this process's hook mode."""
    folder = tmp_path_factory.mktemp("moments")
    command = [sys.executable, str(RECORDER), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def results(moments: Path) -> Comparison:
    return compare(moments)


def functions(row: StackGrowth) -> set[str]:
    return {frame.name for frame in row.stack.frames}


def test_only_the_leak_is_a_leak(results: Comparison) -> None:
    (leak,) = results.leaks
    assert "encode_images" in functions(leak)
    assert leak.blocks == (4, 8, 12, 16)
    assert leak.requested_bytes == tuple(step * 6 * MIB for step in (1, 2, 3, 4))


def test_lazy_state_and_a_full_cache_are_warm_ups(results: Comparison) -> None:
    warmed = [functions(row) for row in results.warm_ups]
    assert any("_init_group" in names for names in warmed)
    assert any("remember" in names for names in warmed)
    assert not any({"encode_images", "load_optimizer", "read_batch"} & names for names in warmed)


def test_the_fragmentation_is_found(results: Comparison) -> None:
    (found,) = results.fragmentation
    assert found.usage.is_held
    assert "read_batch" in {frame.name for frame in found.holders[0].stack.frames}


def test_what_is_loaded_anew_rises_by_what_leaked(results: Comparison) -> None:
    drift = next(row for row in results.drifts if "load_optimizer" in {frame.name for frame in row.stack.frames})
    assert (drift.bytes, drift.blocks) == (32 * MIB, 2)
    assert any("encode_images" in {frame.name for frame in stack.frames} for stack, _ in drift.below)


def test_the_figures_are_pytorchs(results: Comparison, moments: Path) -> None:
    usage = results.processes[0]
    assert usage.process.role == "trainer"
    assert usage.paused == (12 * MIB,) * 4
    for number, path in enumerate(sorted(moments.rglob("*.pickle"))):
        assert path.stat().st_size < LARGEST_FILE
        snapshot = load_snapshot(path)
        assert snapshot.step == number
        assert usage.reserved[number] == sum(segment.bytes for segment in snapshot.segments_of(usage.device))
        assert usage.allocated[number] <= usage.reserved[number]


def test_the_page_shows_it(results: Comparison) -> None:
    page = results.html()
    assert "encode_images" in page and '"state":"paused"' in page


def test_no_path_of_this_machine_is_recorded(moments: Path) -> None:
    for path in moments.rglob("*.pickle"):
        content = path.read_bytes()
        assert str(REPOSITORY).encode() not in content and sys.prefix.encode() not in content
        assert b"/program/record_snapshots.py" in content
