"""Guards the call stacks of an out-of-memory report: the largest of this device, and nothing that starts a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver import _core
from torch_memory_saver._torch.binding import history
from torch_memory_saver._torch.memory import ordinary_memory
from torch_memory_saver.observe._out_of_memory.content import MAX_STACKS, largest_stacks

MIB = 1 << 20


class RecordedTorch:
    """torch with segments. `recording`: whether it records stacks."""

    def __init__(self, recording: bool = True) -> None:
        self.torch = SimpleNamespace(_C=SimpleNamespace(_cuda_isHistoryEnabled=lambda: recording), __version__="2.11.0")
        self.rows: list[dict[str, Any]] = []
        self.read = 0

    def add(self, size: int, *lines: int, device: int = 0, state: str = "active_allocated") -> int:
        """A segment with a block, allocated at these lines."""
        address = (len(self.rows) + 1) << 40
        frames = [{"filename": "train.py", "line": line, "name": "step"} for line in lines]
        block = {"address": address, "size": size, "state": state, "frames": frames}
        self.rows.append({"device": device, "address": address, "total_size": size, "active_size": size, "blocks": [block]})
        return address

    def segments(self) -> list[dict[str, Any]]:
        self.read += 1
        return self.rows

    def memory_stats(self, device: int) -> dict[str, Any]:
        size = sum(row["total_size"] for row in self.rows if row["device"] == device)
        return {name: {"all": {"current": size}} for name in ("reserved_bytes", "active_bytes")}


@pytest.fixture
def recorded(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> RecordedTorch:
    record(monkeypatch, "python")
    return RecordedTorch()


def record(monkeypatch: pytest.MonkeyPatch, stacks: str | None) -> None:
    """This package has begun a recording; None: another caller has."""
    found = None if stacks is None else SimpleNamespace(stacks=stacks)
    recorder = SimpleNamespace(current=found, native_frames=stacks == "all")
    monkeypatch.setattr(history, "_recorder", recorder)


def test_the_largest_come_first_and_equal_stacks_count_together(recorded: RecordedTorch) -> None:
    recorded.add(2 * MIB, 10, 1)
    recorded.add(3 * MIB, 20, 1)
    recorded.add(2 * MIB, 10, 1)
    recorded.add(90 * MIB, 30, device=1)
    recorded.add(90 * MIB, 40, state="inactive")
    recorded.add(MIB)
    found = largest_stacks(recorded, 0)  # type: ignore[arg-type]
    assert found["note"] == ""
    assert [(row["bytes"], row["blocks"], row["frames"]) for row in found["rows"]] == [
        (4 * MIB, 2, ["train.py:10 step", "train.py:1 step"]),
        (3 * MIB, 1, ["train.py:20 step", "train.py:1 step"]),
        (MIB, 1, []),
    ]
    assert found["rows"][2]["origin"] == "allocated before recording, or on a thread of C++"


def test_ten_are_listed(recorded: RecordedTorch) -> None:
    for line in range(MAX_STACKS + 5):
        recorded.add((line + 1) * MIB, line)
    sizes = [row["bytes"] // MIB for row in largest_stacks(recorded, 0)["rows"]]  # type: ignore[arg-type]
    assert sizes == list(range(MAX_STACKS + 5, 5, -1))


def test_what_is_paused_holds_no_memory(recorded: RecordedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    address = recorded.add(9 * MIB, 10)
    recorded.add(MIB, 20)
    row = SimpleNamespace(address=address, bytes=9 * MIB, device=0, state=_core.STATE_PAUSED, tag="a")
    monkeypatch.setattr(_core, "segments", lambda: [row])
    assert [found["bytes"] for found in largest_stacks(recorded, 0)["rows"]] == [MIB]  # type: ignore[arg-type]
    row.state = _core.STATE_ACTIVE
    assert len(largest_stacks(recorded, 0)["rows"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("stacks", ["all", None])
def test_names_of_native_frames_are_not_looked_up(
    recorded: RecordedTorch, monkeypatch: pytest.MonkeyPatch, stacks: str | None
) -> None:
    """Reading the segments at all would do it: PyTorch starts addr2line."""
    record(monkeypatch, stacks)
    recorded.add(MIB, 10)
    found = largest_stacks(recorded, 0)  # type: ignore[arg-type]
    assert found["rows"] == []
    assert "C++ frames" in found["note"]
    monkeypatch.setattr(ordinary_memory, "devices_in_use", lambda: [0])
    memory = ordinary_memory.ordinary_memory(recorded, set())
    assert memory == {0: ordinary_memory.OrdinaryMemory(None, MIB, 0)}, "the ledger reads counters"
    assert recorded.read == 0


def test_counters_do_not_count_managed_memory_twice(recorded: RecordedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, "all")
    recorded.add(10 * MIB, 1)
    monkeypatch.setattr(ordinary_memory, "devices_in_use", lambda: [0, 1])
    rows = [SimpleNamespace(address=1, bytes=4 * MIB, device=0), SimpleNamespace(address=2, bytes=4 * MIB, device=1)]
    monkeypatch.setattr(_core, "segments", lambda: rows)
    assert ordinary_memory.ordinary_memory(recorded, {1, 2}) == {0: ordinary_memory.OrdinaryMemory(None, 6 * MIB, 0)}


def test_without_a_recording_the_note_says_how_to_begin_one(monkeypatch: pytest.MonkeyPatch, simulator: Any) -> None:
    record(monkeypatch, None)
    torch = RecordedTorch(recording=False)
    found = largest_stacks(torch, 0)  # type: ignore[arg-type]
    assert found["rows"] == []
    assert "TMS_DEBUG=history" in found["note"]
    assert torch.read == 0
    assert "PyTorch is not used" in largest_stacks(None, 0)["note"]


def test_nothing_is_live_here(recorded: RecordedTorch) -> None:
    recorded.add(MIB, 1, device=1)
    assert largest_stacks(recorded, 0) == {"rows": [], "note": "PyTorch has no live block on this device"}  # type: ignore[arg-type]
