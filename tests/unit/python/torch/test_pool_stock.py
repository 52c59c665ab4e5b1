"""Guards the idle memory of pools: when it is released to the driver, and what a region takes from the cache; the rule by
which a pool is retired, which weighs what that returns against what it strands; and the end of pools.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeTorch
from threads import InsideRegion

from torch_memory_saver._torch.layer import leak_reference
from torch_memory_saver._torch.pool_stock import Fill, is_worth_retiring, measure_fill, retire
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


@pytest.mark.parametrize(
    ("idle", "free", "live", "stranded", "expected"),
    [
        (0, 0, False, 0, False),
        (2, 0, False, 100, True),  # nothing in it is live
        (2, 0, True, 0, True),
        (18, 18, True, 0, False),
        (20, 18, True, 0, True),
        (20, 18, True, 2, False),  # what is stranded already counts
        (22, 10, True, 11, True),
        (30, 27, True, 0, False),  # a loss of more than 22 MiB
        (54, 27, True, 0, False),
        (55, 27, True, 0, True),
        (0, 27, True, 0, False),
    ],
)
def test_the_rule(idle: int, free: int, live: bool, stranded: int, expected: bool) -> None:
    assert is_worth_retiring(Fill(idle * MIB, free * MIB, live), stranded * MIB) is expected


def test_the_fill_of_segments() -> None:
    def segment(*blocks: tuple[int, str]) -> dict[str, Any]:
        listed = [{"size": size, "state": state} for size, state in blocks]
        return {"total_size": sum(size for size, _ in blocks), "blocks": listed}

    segments = [
        segment((4, "inactive")),
        segment((1, "inactive"), (2, "active_allocated"), (3, "inactive")),
        segment((5, "inactive"), (6, "active_pending_free")),
        segment((7, "active_allocated")),
    ]
    assert measure_fill(segments) == Fill(idle=4, free=9, live=True)
    assert measure_fill(segments[:1]) == Fill(idle=4, free=0, live=False)
    assert measure_fill([]) == Fill(idle=0, free=0, live=False)


def test_what_is_stranded_is_of_the_tag_and_the_device(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    for tag in ("a", "b"):
        with saver.region(tag):
            kept, idle = fake_torch.allocate(20 * MIB), fake_torch.allocate(64 * MIB)
            fake_torch.split(kept, (4 * MIB, "active_allocated"), (16 * MIB, "inactive"))
            fake_torch.free(idle)
    assert store.stranded_bytes(fake_torch, "a", 0) == 16 * MIB  # type: ignore[arg-type]
    assert store.stranded_bytes(fake_torch, "a", 1) == 0  # type: ignore[arg-type]
    assert store.stranded_bytes(fake_torch) == 32 * MIB  # type: ignore[arg-type]
    assert saver.stats().stranded_bytes == 32 * MIB


def test_pools_without_memory_are_not_remembered(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    for _ in range(100):
        with saver.region("a"):
            fake_torch.free(fake_torch.allocate(2 * MIB))
    assert store.retired_pools() == frozenset()
    assert len(fake_torch.alive) <= 2, "one for the next region, and one that is routed while others are emptied"


POOL = (0, 7)


class MemPool:
    """A MemPool, of which only the end matters."""


@pytest.mark.parametrize("quietly", [True, False])
def test_the_end_of_a_pool_that_is_retired(quietly: bool) -> None:
    """Up to 2.9 the end of an object whose pool has another use ends the process: there the object stays."""
    calls: list[str] = []
    torch: Any = SimpleNamespace(
        begin_routing=lambda device, pool: calls.append("begin"),
        end_routing=lambda device, pool: calls.append("end"),
        release_pool=lambda device, pool: calls.append("release"),
        pool_objects_end_quietly=quietly,
    )
    retired = SimpleNamespace(id=POOL, device=0, memory_pool=MemPool(), retirement=None)
    leak_reference(retired.memory_pool)
    alive = weakref.ref(retired.memory_pool)
    retire(torch, retired)
    assert (alive() is None) == quietly
    assert calls == (["begin", "end", "release"] if quietly else ["release"])
