"""Guards the comparison of recorded snapshots (tests/data/memory_snapshots): the planted problems are found in each
recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_memory_saver.memory import Comparison, compare
from torch_memory_saver.memory.model import CallStack

RECORDINGS = Path(__file__).resolve().parents[3] / "data" / "memory_snapshots"
MIB = 1 << 20
LARGEST_FILE = 100_000


@pytest.fixture(params=sorted(path.name for path in RECORDINGS.iterdir() if path.is_dir()))
def recording(request: pytest.FixtureRequest) -> Path:
    return RECORDINGS / str(request.param)


@pytest.fixture
def results(recording: Path) -> Comparison:
    return compare(recording)


def functions(stack: CallStack) -> set[str]:
    return {frame.name for frame in stack.frames}


def test_the_leak_and_the_fragmentation_are_found(results: Comparison) -> None:
    (leak,) = results.leaks
    assert "encode_images" in functions(leak.stack)
    assert leak.requested_bytes == tuple(step * 6 * MIB for step in (1, 2, 3, 4))
    (found,) = results.fragmentation
    assert "read_batch" in functions(found.holders[0].stack)


def test_nothing_else_is_a_leak(results: Comparison) -> None:
    warmed = [functions(row.stack) for row in results.warm_ups]
    assert any("remember" in names for names in warmed)
    assert any("_init_group" in names for names in warmed)


def test_blocks_that_are_loaded_anew_drift(results: Comparison) -> None:
    drift = next(row for row in results.drifts if "load_optimizer" in functions(row.stack))
    assert any("encode_images" in functions(stack) for stack, _ in drift.below)


def test_recordings_are_small_and_name_no_machine(recording: Path) -> None:
    for path in recording.rglob("*.pickle"):
        content = path.read_bytes()
        assert len(content) < LARGEST_FILE
        assert b"/home/" not in content and b"/root/" not in content and b"/work/" not in content
