"""Guards pause and resume with torch's pools: paused memory is never handed out, idle memory is released instead of paused,
and a resume that finds too little memory returns what torch caches in this process.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import FakeTorch, another_thread_inside

from torch_memory_saver import _core, errors
from torch_memory_saver._torch import pausing
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def state(saver: TorchMemorySaver, address: int) -> str:
    (row,) = (row for row in saver.stats().allocations if row.address == address)
    return row.state


def test_pause_and_resume_report(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a", enable_cpu_backup=True):
        fake_torch.allocate(4 * MIB)
    with saver.region("b"):
        fake_torch.allocate(2 * MIB)
    paused = saver.pause()
    assert (paused.allocations, paused.bytes, paused.copied_bytes, paused.unknown_tags) == (2, 6 * MIB, 4 * MIB, 0)
    assert paused.reusable_bytes == 0
    assert saver.pause().allocations == 0
    resumed = saver.resume(["a", "b", "never allocated with"])
    assert (resumed.allocations, resumed.bytes, resumed.copied_bytes, resumed.unknown_tags) == (2, 6 * MIB, 4 * MIB, 1)


def test_a_region_entered_while_its_tag_is_paused_gets_no_paused_memory(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        used, cached = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
    (pool,) = store.idle_pools()
    saver.pause("a")
    fake_torch.free(cached)  # An idle block, paused: what torch would hand out next.
    for _ in range(2):
        with saver.region("a"):
            fresh = fake_torch.allocate(2 * MIB)
        assert fresh not in (used, cached)
        assert state(saver, fresh) == "active"
        fake_torch.free(fresh)
    assert len(store.idle_pools()) == 2, "the second entry uses the pool of the first"
    assert pool in store.idle_pools()
    saver.resume("a")
    assert pool not in store.idle_pools(), "it is retired, which returns the idle block"
    assert [row.address for row in saver.stats().allocations] == [used]


def test_pools_are_entered_again_after_the_resume(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    for _ in range(10):
        saver.pause("a")
        with saver.region("a"):
            pass
        saver.resume("a")
        with saver.region("a"):
            pass
    assert len(store.idle_pools()) == 2, "a cycle must not leave a pool behind"


def test_a_partial_resume_keeps_the_other_tag_away(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    addresses = {}
    for tag in ("a", "b"):
        with saver.region(tag):
            addresses[tag] = fake_torch.allocate(2 * MIB)
    saver.pause()
    for address in addresses.values():
        fake_torch.free(address)
    saver.resume("a")
    with saver.region("a"):
        assert fake_torch.allocate(2 * MIB) == addresses["a"]
    with saver.region("b"):
        assert fake_torch.allocate(2 * MIB) != addresses["b"]


def test_idle_memory_is_released_instead_of_paused(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a", enable_cpu_backup=True):
        gone, kept = fake_torch.allocate(4 * MIB), fake_torch.allocate(2 * MIB)
    fake_torch.free(gone)
    report = saver.pause("a")
    assert (report.allocations, report.copied_bytes) == (1, 2 * MIB)
    assert [row.address for row in saver.stats().allocations] == [kept]


def test_idle_memory_of_other_tags_stays(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    with saver.region("b"):
        idle = fake_torch.allocate(2 * MIB)
    fake_torch.free(idle)
    saver.pause("a")
    assert fake_torch.emptied == 0
    assert saver.stats().tags["b"].resident_bytes == 2 * MIB


def test_a_pause_inside_the_region_changes_its_pool(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        used, idle = fake_torch.allocate(2 * MIB), fake_torch.allocate(4 * MIB)
        with saver.region("b"):
            fake_torch.free(idle)
            assert saver.pause("a").bytes == 2 * MIB, "the idle segment went back"
            inner = fake_torch.allocate(2 * MIB)
        fake_torch.free(used)  # An idle block, paused: what torch would hand out next.
        fresh = fake_torch.allocate(2 * MIB)
        assert state(saver, used) == "paused"
        assert state(saver, fresh) == state(saver, inner) == "active"
        saver.resume("a")
    tags = {row.address: row.tag for row in saver.stats().allocations}
    assert tags == {inner: "b", fresh: "a"}, "the paused block is returned at the resume"


def test_a_paused_block_of_ones_own_region_is_not_handed_out(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        used = fake_torch.allocate(2 * MIB)
        saver.pause("a")
        fake_torch.free(used)
        fresh = fake_torch.allocate(2 * MIB)
        assert fresh != used
        assert state(saver, fresh) == "active"
        saver.resume("a")


def test_the_pool_that_was_paused_inside_its_region_is_used_again(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        used = fake_torch.allocate(2 * MIB)
        saver.pause("a")
    saver.resume("a")
    pools = {pool.id for pool in store.idle_pools(("a",))}
    assert fake_torch.pool_of(used) in pools
    with saver.region("a"), saver.region("a"):
        pass
    assert {pool.id for pool in store.idle_pools(("a",))} == pools, "no pool was made"


def test_a_second_pause_inside_the_region(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        for expected in (2 * MIB, 2 * MIB):
            used = fake_torch.allocate(2 * MIB)
            assert saver.pause("a").bytes == expected
            assert state(saver, used) == "paused"
        assert saver.pause("a").bytes == 0
    assert saver.resume("a").bytes == 4 * MIB


def test_another_thread_in_the_region_is_an_error(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("b"):
        fake_torch.allocate(2 * MIB)
    with another_thread_inside(saver, fake_torch, "a"):
        for tags in (None, "a", ["b", "a"]):
            with pytest.raises(errors.InvalidStateError, match=r"thread '.*' \(\d+\) is still inside region\(tag='a'\)"):
                saver.pause(tags, timeout=None)
        assert saver.stats().total.paused_bytes == 0
        assert saver.pause("b").bytes == 2 * MIB, "a tag without a thread in it can be paused"
    assert saver.pause("a").bytes == 2 * MIB


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
    wait = store._changed.wait_until

    def announce(holds: Callable[[], bool], deadline: float) -> bool:
        waiting.set()
        return wait(holds, deadline)

    store._changed.wait_until = announce  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    with pausing.pausing(store, fake_torch, ("a",), math.inf):  # type: ignore[arg-type]
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
