"""Guards what a pause and a resume must not do: empty a cache during a capture, read blocks without need, and let a region
in before a pause has ended. What PyTorch's pools do is in tests/torch/test_pausing.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.memory import pause_preparation
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def state(saver: TorchMemorySaver, address: int) -> str:
    (row,) = (row for row in saver.stats().allocations if row.address == address)
    return row.state


def test_a_region_entered_during_a_pause_waits_for_its_end(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        old = fake_torch.allocate(2 * MIB)
    entered: list[int] = []

    def work() -> None:
        with saver.region("a"):
            entered.append(fake_torch.allocate(2 * MIB))

    waiting = threading.Event()
    wait = store.regions._admission.changed.wait_until

    def announce(holds: Callable[[], bool], deadline: float) -> bool:
        waiting.set()
        return wait(holds, deadline)

    store.regions._admission.changed.wait_until = announce  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    with pause_preparation.PausePreparation(store, fake_torch, ("a",), math.inf):  # type: ignore[arg-type]
        thread.start()
        assert waiting.wait(60)
        assert entered == []
        fake_torch.free(old)
        _core.pause(("a",), None)
    thread.join()
    assert state(saver, entered[0]) == "active"
    assert entered[0] != old


def test_a_failed_pause_changes_nothing(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        fake_torch.free(fake_torch.allocate(4 * MIB))
        routed = list(fake_torch.routings)
        _core.capture_begin(None, _core.BACKUP_NONE)
        try:
            with pytest.raises(errors.CaptureInProgressError):
                saver.pause("a")
        finally:
            _core.capture_end()
        assert fake_torch.routings == routed
        assert fake_torch.emptied == 0, "nothing may be freed during a capture"
    assert saver.pause("a").bytes == 2 * MIB


def test_a_failed_pause_keeps_the_pools_of_regions_although_earlier_memory_is_paused(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    saver.pause("a")
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        routed = list(fake_torch.routings)
        _core.capture_begin(None, _core.BACKUP_NONE)
        try:
            with pytest.raises(errors.CaptureInProgressError):
                saver.pause("a")
        finally:
            _core.capture_end()
        assert fake_torch.routings == routed
    saver.resume("a")


@pytest.fixture
def paused(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> int:
    """300 of the device's 512 MiB are paused, and 300 are cached in a pool of another tag. The address of what is paused."""
    with saver.region("a"):
        address = fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        idle = fake_torch.allocate(300 * MIB)
    fake_torch.free(idle)
    return address


def state_of(address: int) -> int:
    row = _core.find(address)
    assert row is not None
    return row.state


def test_nothing_is_emptied_during_a_capture(saver: TorchMemorySaver, fake_torch: FakeTorch, paused: int) -> None:
    _core.capture_begin(None, 0)
    try:
        with pytest.raises(errors.CaptureInProgressError):
            saver.resume("a")
    finally:
        _core.capture_end()
    assert fake_torch.emptied == 0
    assert saver.resume("a").allocations == 1


def test_a_resume_reads_no_blocks_if_nothing_was_freed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver.region("a", enable_cpu_backup=True):
        kept, gone = fake_torch.allocate(2 * MIB), fake_torch.allocate(4 * MIB)
    fake_torch.free(fake_torch.allocate(2 * MIB))  # cached outside of regions
    reads = []
    real = fake_torch.segments

    def counted(*arguments: Any) -> list[dict[str, Any]]:
        reads.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(fake_torch, "segments", counted)
    for _ in range(2):
        saver.pause("a")
        reads.clear()
        assert saver.resume("a").allocations == 2
        assert reads == []
    saver.pause("a")
    fake_torch.free(gone)
    emptied = fake_torch.emptied
    assert saver.resume("a").copied_bytes == 2 * MIB
    # Otherwise the end of the pool's object has released it.
    assert fake_torch.emptied == emptied + fake_torch.routing_spares_cache
    assert state_of(kept) == _core.STATE_ACTIVE
    assert _core.find(gone) is None
