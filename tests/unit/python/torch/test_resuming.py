"""Guards a resume that finds too little memory while torch only caches it in this process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from fake_torch import FakeTorch, another_thread_inside

from torch_memory_saver import _core, errors
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


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


@pytest.mark.parametrize("wait", [True, False])
def test_the_cache_is_emptied_first(saver: TorchMemorySaver, fake_torch: FakeTorch, paused: int, wait: bool) -> None:
    failures = _core.counters()["failures_total"]
    if wait:
        saver.resume("a", timeout=60)
    else:
        saver.resume("a", timeout=60, wait=False).wait()
    assert state_of(paused) == _core.STATE_ACTIVE
    assert fake_torch.emptied == 1
    assert _core.counters()["failures_total"] == failures, "no attempt was made before"


def test_the_cache_stays_if_there_is_room(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.region("a"):
        fake_torch.allocate(100 * MIB)
    saver.pause("a")
    with saver.region("b"):
        idle = fake_torch.allocate(100 * MIB)
    fake_torch.free(idle)
    assert saver.resume("a").allocations == 1
    assert fake_torch.emptied == 0


def test_memory_kept_by_another_threads_region_is_named(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    with saver.region("a"):
        address = fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        other = fake_torch.allocate(300 * MIB)
    with another_thread_inside(saver, fake_torch, "c"):
        fake_torch.free(fake_torch.allocate(300 * MIB))
        with pytest.raises(errors.OutOfMemoryError, match=rf"still caches {300 * MIB} bytes.*another thread") as caught:
            saver.resume("a")
        assert "which gave" not in str(caught.value)
        assert state_of(address) == _core.STATE_PAUSED
    fake_torch.free(other)
    assert saver.resume("a").allocations == 1


def test_a_failure_keeps_nothing_of_its_callers(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    """Their frames hold tensors, which must be freed with the exception and not at the next garbage collection."""

    class Tensor:
        pass

    def caller() -> weakref.ref[Tensor]:
        tensor = Tensor()
        kept = weakref.ref(tensor)
        with pytest.raises(errors.OutOfMemoryError):
            saver.resume("a")
        return kept

    with saver.region("a"):
        fake_torch.allocate(300 * MIB)
    saver.pause("a")
    with saver.region("b"):
        fake_torch.allocate(300 * MIB)
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_memory_cached_after_the_first_look_is_released_as_well(
    saver: TorchMemorySaver, fake_torch: FakeTorch, paused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or another thread, may take memory that was free at the query."""
    real = _core.device_memory
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((real(device).total, real(device).total)))
    assert saver.resume("a").allocations == 1
    assert fake_torch.emptied == 1


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
    assert fake_torch.emptied == emptied + 1
    assert state_of(kept) == _core.STATE_ACTIVE
    assert _core.find(gone) is None


def test_a_deletion_between_two_pauses_is_found(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        gone = fake_torch.allocate(4 * MIB)
    with saver.region("b"):
        fake_torch.allocate(4 * MIB)
    saver.pause("a")
    fake_torch.free(gone)
    saver.pause("b")
    report = saver.resume()
    assert report.allocations == 1
    assert _core.find(gone) is None
