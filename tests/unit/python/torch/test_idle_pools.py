"""Guards the rule by which a pool is retired, which weighs the memory that this returns against the memory that it strands,
the end of pools, and which memory has the tensors of the last pause. When idle memory goes back is in
tests/torch/test_pools.py and tests/gpu/test_idle_memory.py."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeTorch
from other_threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.layer import leak_reference
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.pools import idle, retirement
from torch_memory_saver._torch.pools.fill import Fill, is_worth_retiring, measure_fill
from torch_memory_saver._torch.pools.retirement import retire
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver._torch.records.pool import Key
from torch_memory_saver.options import RegionOptions
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def resident(saver: TorchMemorySaver, tag: str) -> int:
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


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


class Old:
    """Whether all tensors at an address were there at the last pause of their tag."""

    def __init__(self, store: PoolStore, torch: Any) -> None:
        self.store, self.torch = store, torch

    def __call__(self, address: int) -> bool:
        row = _core.find(address)
        assert row is not None
        return self.store.idle_pools.has_tensors_of_last_pause(self.torch, row)


@pytest.fixture
def is_old(store: PoolStore, fake_torch: FakeTorch) -> Old:
    return Old(store, fake_torch)


def cycle(saver: TorchMemorySaver) -> None:
    saver.pause()
    saver.resume()


def test_tensors_are_old_until_a_region_enters_their_pool(
    saver: TorchMemorySaver, fake_torch: FakeTorch, is_old: Old
) -> None:
    with saver.region("a"):
        kept = fake_torch.allocate(2 * MIB)
    assert not is_old(kept), "it was not paused"
    for _ in range(2):
        cycle(saver)
        with saver.region("a", enable_cpu_backup=True), saver.region("b"):
            other = fake_torch.allocate(2 * MIB)
        assert [is_old(kept), is_old(other)] == [True, False]
        with saver.region("a"):
            assert not is_old(kept)
        assert not is_old(kept)


def test_tensors_of_a_retired_pool_are_old(saver: TorchMemorySaver, fake_torch: FakeTorch, is_old: Old) -> None:
    with saver.region("a"):
        kept, idle = fake_torch.allocate(2 * MIB), fake_torch.allocate(300 * MIB)
    cycle(saver)
    fake_torch.free(idle)
    saver.empty_cache()
    assert _core.find(idle) is None
    with saver.region("a"):
        new = fake_torch.allocate(2 * MIB)
    assert [is_old(kept), is_old(new)] == [True, False]


def test_tensors_of_a_pool_that_a_graph_uses_are_unknown(
    saver: TorchMemorySaver, fake_torch: FakeTorch, is_old: Old
) -> None:
    with saver.region("a"):
        kept = fake_torch.allocate(2 * MIB)
    cycle(saver)
    graph = fake_torch.torch.cuda.CUDAGraph()
    with fake_torch.capture(graph, fake_torch.pool_of(kept), None, "global"):
        pass
    assert not is_old(kept)


def test_tensors_of_the_pool_of_another_tag_or_device_or_outside_of_regions_are_unknown(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.region("a"):
        row = _core.find(fake_torch.allocate(2 * MIB))
    assert row is not None
    cycle(saver)
    torch: Any = fake_torch
    (pool,) = store.idle_pools.select(("a",))
    for key in (Key(RegionOptions.check("b"), 0), Key(RegionOptions.check("a"), 1), Key(RegionOptions.disabled("a"), 0)):
        pool.key = key
        assert not store.idle_pools.has_tensors_of_last_pause(torch, row), key
    pool.key = Key(RegionOptions.check("a"), 0)
    assert store.idle_pools.has_tensors_of_last_pause(torch, row)


def test_segments_are_listed_once_for_each_pause(
    saver: TorchMemorySaver, fake_torch: FakeTorch, is_old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver.region("a"):
        kept = [fake_torch.allocate(2 * MIB) for _ in range(3)]
    listed: list[Any] = []
    segments = fake_torch.segments
    for number in (1, 2):
        cycle(saver)
        with monkeypatch.context() as patch:
            patch.setattr(fake_torch, "segments", lambda *pool: (listed.append(pool), segments(*pool))[1])
            assert all(map(is_old, kept))
        assert len(listed) == number
        with saver.region("a"):
            kept.append(fake_torch.allocate(2 * MIB))


POOL = (0, 7)


class MemPool:
    """A MemPool, of which only the end matters."""


class Torch(SimpleNamespace):
    """PyTorch's functions that retire a pool. `calls` has the names of those that were called."""

    def __init__(self, **versions: bool) -> None:
        self.calls: list[str] = []
        self.capturing = False
        super().__init__(**versions)

    def begin_routing(self, device: int, pool: Any) -> None:
        self.calls.append("begin")

    def end_routing(self, device: int, pool: Any) -> None:
        self.calls.append("end")

    def release_pool(self, device: int, pool: Any) -> None:
        self.calls.append("release")

    def is_capturing(self) -> bool:
        return self.capturing


def retirable() -> tuple[Any, weakref.ref[MemPool]]:
    pool = SimpleNamespace(id=POOL, device=0, memory_pool=MemPool(), retirement=None)
    leak_reference(pool.memory_pool)
    return pool, weakref.ref(pool.memory_pool)


@pytest.mark.parametrize("quietly", [True, False])
def test_the_end_of_a_pool_that_is_retired(quietly: bool) -> None:
    """Up to 2.9 the end of an object whose pool has another use ends the process: there the object stays."""
    torch: Any = Torch(pool_objects_end_quietly=quietly, routing_spares_cache=True)
    retired, alive = retirable()
    retire(torch, retired)
    assert (alive() is None) == quietly
    assert torch.calls == (["begin", "end", "release"] if quietly else ["release"])


@pytest.mark.parametrize("capturing", [True, False])
def test_the_end_of_the_object_is_its_pools_last_use_unless_a_capture_is_active(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 2.13 it releases the pool's memory, which would break a capture."""
    monkeypatch.setattr(retirement, "devices_in_use", list)
    monkeypatch.setattr(retirement._core, "counters", lambda: {"visible_captures": 0})
    torch: Any = Torch(pool_objects_end_quietly=True, routing_spares_cache=False, capturing=capturing)
    retired, alive = retirable()
    retire(torch, retired)
    assert alive() is None
    assert torch.calls == (["begin", "end", "release"] if capturing else [])


def test_two_threads_retire_a_pool_once(store: PoolStore, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first one calls PyTorch, which releases the GIL."""
    torch: Any = fake_torch
    pools = [store.idle_pools.make_pool(torch, Key(RegionOptions.check("a"), 0)) for _ in range(2)]
    for pool in pools:
        store.idle_pools.retire_later(pool)
    retired: list[Any] = []

    def retire_and_be_overtaken(torch: Any, pool: Any) -> None:
        retired.append(pool)
        if len(retired) == 1:
            in_thread(lambda: store.idle_pools.retire_postponed(torch))
            raise KeyboardInterrupt

    monkeypatch.setattr(idle, "retire", retire_and_be_overtaken)
    with pytest.raises(KeyboardInterrupt):
        store.idle_pools.retire_postponed(torch)
    assert retired == pools[:1]
    for _ in range(2):  # the second time there is none left
        store.idle_pools.retire_postponed(torch)
        assert retired == [pools[0], *pools], "the interrupted one is retired again, which continues"


def test_a_routing_may_end_while_the_pools_are_listed(store: PoolStore, fake_torch: FakeTorch) -> None:
    """Routings to spare pools begin and end without the lock."""
    torch: Any = fake_torch
    regions = store.regions

    class EndedMeanwhile(Frame):
        @property
        def routed(self) -> bool:
            regions._admission.frames.pop(1, None)
            return False

        @routed.setter
        def routed(self, value: bool) -> None:
            pass

    frame = EndedMeanwhile(torch, RegionOptions.check("a"), regions.stack())
    frame.pools = [store.idle_pools.make_pool(torch, Key(frame.options, 0))]
    regions._admission.frames.update({0: frame, 1: Frame(torch, frame.options, regions.stack())})
    try:
        assert regions.pools_without_captures(torch, []) == frozenset()
    finally:
        regions._admission.frames.clear()
