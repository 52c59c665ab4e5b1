"""Guards the idle memory of pools: when it is released to the driver, and what a region takes from the cache."""

from __future__ import annotations

from typing import Any

from fake_torch import FakeTorch
from threads import InsideRegion

from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def resident(saver: TorchMemorySaver, tag: str) -> int:
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


def test_empty_cache_releases_unused_memory(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.region("a"):
        gone, kept = fake_torch.allocate(4 * MIB), fake_torch.allocate(2 * MIB)
    fake_torch.free(gone)
    before = simulator.usage().physical_bytes
    saver.empty_cache()
    assert before - simulator.usage().physical_bytes == 4 * MIB
    assert [row.address for row in saver.stats().allocations] == [kept]


def test_empty_cache_keeps_pools_without_idle_memory(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    pools = store.idle_pools()
    fake_torch.free(fake_torch.allocate(2 * MIB))  # so that the pools are looked at
    saver.empty_cache()
    assert store.idle_pools() == pools


def test_memory_is_released_with_the_last_tensor_of_a_retired_pool(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        gone, kept = fake_torch.allocate(4 * MIB), fake_torch.allocate(2 * MIB)
    fake_torch.free(gone)
    saver.empty_cache()
    fake_torch.free(kept)
    saver.empty_cache()
    assert saver.stats().total.allocations == 0
    assert fake_torch.alive == set()
    assert all(uses == 0 for uses in fake_torch.uses.values())


def test_empty_cache_inside_regions(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        outer = fake_torch.allocate(4 * MIB)
        with saver.region("b"):
            inner, kept = fake_torch.allocate(4 * MIB), fake_torch.allocate(2 * MIB)
            fake_torch.free(outer)
            fake_torch.free(inner)
            saver.empty_cache()
            assert [row.address for row in saver.stats().allocations] == [kept]
            again = fake_torch.allocate(2 * MIB)
        last = fake_torch.allocate(2 * MIB)
    tags = {row.address: row.tag for row in saver.stats().allocations}
    assert tags == {kept: "b", again: "b", last: "a"}
    assert fake_torch.pool_of(again) != fake_torch.pool_of(last), (
        "the inner region's pool is in force again, not the outer one's"
    )


def test_empty_cache_while_another_thread_is_in_a_region(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    other = InsideRegion(saver, "b", fake_torch)
    with saver.region("a"):
        fake_torch.free(fake_torch.allocate(4 * MIB))
    saver.empty_cache()
    other.leave()
    assert resident(saver, "a") == 0, "the last thread to leave empties what could not be emptied before"


def test_a_full_cache_is_emptied_at_entry(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.region("a"):
        idle = fake_torch.allocate(300 * MIB)
    fake_torch.free(idle)
    with saver.region("b"):
        fake_torch.allocate(300 * MIB)
    assert resident(saver, "a") == 0


def test_with_room_the_cache_stays(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("b"):
        pass
    with saver.region("a"):
        idle = fake_torch.allocate(100 * MIB)
    fake_torch.free(idle)
    with saver.region("b"):
        pass
    assert resident(saver, "a") == 100 * MIB
    assert fake_torch.emptied == 0


def test_nothing_is_emptied_during_a_capture(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        idle = fake_torch.allocate(300 * MIB)
    fake_torch.free(idle)
    with fake_torch.capture(fake_torch.torch.cuda.CUDAGraph(), fake_torch.make_pool(0, False).id, None, "global"):
        saver.empty_cache()
        with saver.region("b"):
            pass
    assert fake_torch.emptied == 0
    assert resident(saver, "a") == 300 * MIB
