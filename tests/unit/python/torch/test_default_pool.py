"""Guards the pools that take the place of PyTorch's default pool while its memory is paused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeTorch, another_thread_inside

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20

recent = pytest.mark.parametrize("fake_torch", [True], ids=["torch-2.11"], indirect=True)


@pytest.fixture
def managing(saver: TorchMemorySaver, fake_torch: FakeTorch) -> TorchMemorySaver:
    """The saver of a process whose default pool is managed."""
    fake_torch.managed[DEFAULT] = True
    saver._use()._graph_pools.default_pool_managed = True
    saver._use()._manages_everything = True
    make_pool: Callable[[int, bool], Any] = fake_torch.make_pool

    def make_pool_that_is_managed(device: int, managed: bool) -> Any:
        pool = make_pool(device, managed)
        fake_torch.managed[pool.id] = True  # as cudaMalloc is
        return pool

    fake_torch.make_pool = make_pool_that_is_managed
    return saver


def is_paused(address: int) -> bool:
    row = _core.find(address)
    assert row is not None
    return bool(row.state != _core.STATE_ACTIVE)


@recent
def test_a_block_that_becomes_free_is_not_handed_out(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    first, second = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
    assert managing.pause().reusable_bytes == 0
    fake_torch.free(second)
    during = fake_torch.allocate(2 * MIB)
    assert during != second and not is_paused(during)
    assert managing.pause().reusable_bytes == 0
    fake_torch.free(during)
    later = fake_torch.allocate(2 * MIB)
    assert later not in (first, second, during) and not is_paused(later)
    managing.resume()
    assert fake_torch.routings == []
    assert fake_torch.pool_of(fake_torch.allocate(2 * MIB)) == DEFAULT


@recent
def test_a_pause_of_other_tags_changes_nothing(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.allocate(2 * MIB)
    with managing.region("a"):
        fake_torch.allocate(2 * MIB)
    pools = fake_torch.next
    managing.pause("a")
    assert (fake_torch.routings, fake_torch.next, fake_torch.caching) == ([], pools, True)
    managing.resume()


@pytest.mark.parametrize("fake_torch", [False], indirect=True)
def test_an_older_torch_reports_the_bytes(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.split(fake_torch.allocate(4 * MIB), (MIB, "active_allocated"), (3 * MIB, "inactive"))
    assert managing.pause().reusable_bytes == 3 * MIB
    assert fake_torch.routings == []
    managing.resume()


@recent
def test_a_thread_inside_a_region_keeps_its_routing(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.split(fake_torch.allocate(4 * MIB), (MIB, "active_allocated"), (3 * MIB, "inactive"))
    with another_thread_inside(managing, fake_torch, "a"):
        assert managing.pause("default").reusable_bytes == 3 * MIB
        assert len(fake_torch.routings) == 1
        managing.resume()
    assert managing.pause("default").reusable_bytes == 0
    managing.resume()


@recent
def test_this_threads_regions_take_precedence(managing: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    fake_torch.allocate(2 * MIB)
    with managing.region("a"):
        managing.pause("default")
        assert fake_torch.pool_of(fake_torch.allocate(2 * MIB)) == store.stack()[0].pools[0].id
    assert fake_torch.pool_of(fake_torch.allocate(2 * MIB)) == store.substitutes.target(0)
    managing.resume()


@recent
def test_a_cache_is_emptied_while_caching_is_off(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    used, idle = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
    managing.pause()
    fake_torch.free(idle)
    during = fake_torch.allocate(2 * MIB)
    fake_torch.free(during)
    fake_torch.calls.clear()
    managing.empty_cache()
    assert fake_torch.calls == ["caching off", "empty_cache", "caching on"]
    assert [row.address for row in fake_torch.rows] == [used]
    assert len(fake_torch.routings) == 1
    assert not is_paused(fake_torch.allocate(2 * MIB))
    managing.resume()


@recent
@pytest.mark.parametrize("step", ["begin_routing_of_all_threads", "set_caching", "empty_cache", "end_routing"])
def test_a_signal_while_a_cache_is_emptied(
    managing: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch.allocate(2 * MIB)
    managing.pause()
    call = getattr(fake_torch, step)

    def call_and_raise(*arguments: Any) -> None:
        call(*arguments)
        if arguments != (False,):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fake_torch, step, call_and_raise)
        with pytest.raises(KeyboardInterrupt):
            managing.empty_cache()
    managing.pause("another")
    assert fake_torch.caching
    assert [routing[1:] for routing in fake_torch.routings] == [(store.substitutes.target(0), None)]
    managing.resume()
    assert (fake_torch.routings, fake_torch.caching) == ([], True)


@recent
def test_a_pool_that_the_program_drops_is_kept(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.allocate(2 * MIB)
    programs = fake_torch.torch.cuda.MemPool(fake_torch, 0, False)
    pool = programs.id
    managing.pause()
    del programs
    gc.collect()
    assert fake_torch.uses[pool] == 1
    managing.resume()
    gc.collect()
    assert fake_torch.uses[pool] == 0


@recent
def test_a_refused_pause_leaves_nothing(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.allocate(2 * MIB)
    identity = _core.capture_begin(None, _core.BACKUP_NONE)
    try:
        with pytest.raises(errors.CaptureInProgressError):
            managing.pause()
    finally:
        _core.capture_end(identity)
    assert fake_torch.routings == []
