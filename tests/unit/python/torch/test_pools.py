"""Guards regions over torch's pools: the pool of an allocation, and when memory is released to the driver."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import DEFAULT, FakeTorch
from threads import InsideRegion, in_thread

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.pools import Key, PoolStore
from torch_memory_saver.options import RegionOptions
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def resident(saver: TorchMemorySaver, tag: str) -> int:
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


def test_a_region_routes_a_pool_and_leaves_none(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    outside = fake_torch.allocate(2 * MIB)
    with saver.region("a"):
        inside = fake_torch.allocate(2 * MIB)
        assert _core.region_current() == ("a", _core.BACKUP_NONE, True, 1, True)
    after = fake_torch.allocate(2 * MIB)
    assert fake_torch.pool_of(outside) == fake_torch.pool_of(after) == DEFAULT
    assert fake_torch.pool_of(inside) != DEFAULT
    assert resident(saver, "a") == 2 * MIB
    assert _core.region_current().depth == 0
    options = RegionOptions("a", _core.BACKUP_NONE, _core.HOST_DEFAULT, managed=True)
    assert [pool.key for pool in store.idle_pools()] == [Key(options, device=0)]


def test_the_pool_is_used_again(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    for _ in range(5):
        with saver.region("a"):
            fake_torch.allocate(2 * MIB)
    assert len(store.idle_pools()) == 1
    assert len(fake_torch.alive) == 1


def test_pools_differ_by_tag_backup_and_runs(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    pools = set()
    for arguments in [
        {},
        {"enable_cpu_backup": True},
        {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
        {"tag": "b"},
        {"tag": "b", "runs": False},
    ]:
        with saver.region(**arguments):  # type: ignore[arg-type]
            pools.add(fake_torch.pool_of(fake_torch.allocate(2 * MIB)))
    assert len(pools) == 5
    assert len({(row.tag, row.backup) for row in saver.stats().allocations}) == 4


@pytest.mark.parametrize("inner_tag", ["a", "b"])
def test_regions_nest(saver: TorchMemorySaver, fake_torch: FakeTorch, inner_tag: str) -> None:
    with saver.region("a"):
        first = fake_torch.allocate(2 * MIB)
        with saver.region(inner_tag):
            second = fake_torch.allocate(2 * MIB)
        third = fake_torch.allocate(2 * MIB)
    assert fake_torch.pool_of(first) == fake_torch.pool_of(third) != fake_torch.pool_of(second)
    assert {row.address: row.tag for row in saver.stats().allocations} == {first: "a", second: inner_tag, third: "a"}


def test_two_threads_in_one_tag(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    other = InsideRegion(saver, "a", fake_torch)
    with saver.region("a"):
        mine = fake_torch.allocate(2 * MIB)
    other.leave()
    assert fake_torch.pool_of(mine) != fake_torch.pool_of(other.address)
    assert resident(saver, "a") == 4 * MIB


def test_an_exception_restores_everything(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with pytest.raises(ZeroDivisionError), saver.region("a"), saver.region("b"):
        raise ZeroDivisionError
    assert fake_torch.routings == []
    assert store.stack() == []
    assert _core.region_current().depth == 0


def test_an_exception_of_the_body_is_kept_if_leaving_fails(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    store: PoolStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        raise errors.DriverError("injected failure")

    fake_torch.devices = 2
    with monkeypatch.context() as inside, pytest.raises(ZeroDivisionError), saver.region("a"):
        inside.setattr(_core, "refresh_peers", refuse)
        raise ZeroDivisionError
    assert "injected failure" in caplog.text
    with monkeypatch.context() as inside, pytest.raises(errors.DriverError, match="injected failure"), saver.region("a"):
        inside.setattr(_core, "refresh_peers", refuse)
    assert fake_torch.routings == []
    assert store.stack() == []
    assert _core.region_current().depth == 0


def test_a_failed_entry_restores_everything(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("outer"):
        routed = list(fake_torch.routings)
        fake_torch.fail_begin_of_new_pools_on = 0
        with pytest.raises(RuntimeError, match="injected failure"):
            saver.region("a").__enter__()
        assert fake_torch.routings == routed
        assert _core.region_current().tag == "outer"
        assert len(store.stack()) == 1
    assert saver.pause("a").allocations == 0, "no thread is inside it"


def test_a_region_decorates_functions(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    @saver.region("a")  # type: ignore[operator]
    def work(depth: int) -> int:
        if depth:
            work(depth - 1)
        return fake_torch.allocate(2 * MIB)

    assert fake_torch.pool_of(work(2)) != DEFAULT
    assert resident(saver, "a") == 6 * MIB


def test_one_object_can_be_entered_again_and_nested(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    region = saver.region("a")
    for _ in range(2):
        with region, region:
            fake_torch.allocate(2 * MIB)
    assert _core.region_current().depth == 0
    assert resident(saver, "a") == 4 * MIB


def test_every_visible_device_is_routed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.devices = 3  # Only 0 is in use.
    with saver.region("a"):
        assert [routing[0] for routing in fake_torch.routings] == [0, 1, 2]
        inside = fake_torch.allocate(2 * MIB, device=1)
    assert fake_torch.routings == []
    row = _core.find(inside)
    assert row is not None
    assert (row.device, row.tag) == (1, "a")


def test_pools_of_every_device_are_used_again(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    fake_torch.devices = 3
    for _ in range(3):
        with saver.region("a"), saver.disable(), saver.region("a"):
            pass
    assert [pool.key.device for pool in store.idle_pools()] == [0, 0, 1, 1, 2, 2]
    assert len(fake_torch.alive) == 6, "those of disable() are gone"


def test_a_pool_of_one_device_that_is_missing_is_made(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    fake_torch.devices = 3
    with saver.region("a"):
        gone = fake_torch.allocate(2 * MIB, device=1)
    fake_torch.free(gone)
    saver.empty_cache()
    assert [pool.key.device for pool in store.idle_pools()] == [0, 2]
    before = {pool.id for pool in store.idle_pools()}
    with saver.region("a"):
        routed = [routing[:2] for routing in fake_torch.routings]
    assert [device for device, _ in routed] == [0, 1, 2]
    assert {pool for device, pool in routed if device != 1} == before


def test_free_memory_of_unused_devices_is_not_queried(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch.devices = 2
    asked: list[int] = []
    device_memory = _core.device_memory
    monkeypatch.setattr(_core, "device_memory", lambda device: (asked.append(device), device_memory(device))[1])
    with saver.region("a"):
        pass
    assert asked == [0], "asking makes a context"


def test_a_region_of_a_paused_tag_gets_other_pools_on_every_device(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.devices = 2
    with saver.region("a"):
        first = [fake_torch.allocate(2 * MIB, device) for device in (0, 1)]
    saver.pause("a")
    with saver.region("a"):
        second = [fake_torch.allocate(2 * MIB, device) for device in (0, 1)]
    saver.resume("a")
    assert not {fake_torch.pool_of(address) for address in first} & {fake_torch.pool_of(address) for address in second}
    devices = {row.address: row.device for row in saver.stats().allocations}
    assert [devices[address] for address in first + second] == [0, 1, 0, 1]


def test_a_failed_entry_on_the_second_device_restores_everything(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    fake_torch.devices = 2
    with saver.region("outer"):
        routed = list(fake_torch.routings)
        region = saver.region("a")
        fake_torch.fail_begin_of_new_pools_on = 1
        with pytest.raises(RuntimeError, match="injected failure"):
            region.__enter__()
        fake_torch.fail_begin_of_new_pools_on = -1
        assert fake_torch.routings == routed
        assert _core.region_current().tag == "outer"
    assert store.stack() == []
    with saver.region("a"):
        assert [routing[0] for routing in fake_torch.routings] == [0, 1]


# backward()


@pytest.mark.parametrize("before", [True, False])
def test_backward_runs_on_its_caller_inside_regions(saver: TorchMemorySaver, fake_torch: FakeTorch, before: bool) -> None:
    fake_torch.set_autograd_threads(before)
    with saver.region("a"):
        assert not fake_torch.autograd_threads()
        with saver.disable(), saver.region("b"):
            assert not fake_torch.autograd_threads()
        in_thread(lambda: pytest.fail("another thread's setting") if not fake_torch.autograd_threads() else None)
        assert not fake_torch.autograd_threads()
    assert fake_torch.autograd_threads() is before


def test_backward_runs_as_before_when_the_last_region_is_left(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    first, second = saver.region("a"), saver.region("b")
    first.__enter__()
    second.__enter__()
    with pytest.warns(RuntimeWarning, match="stays in force"):
        first.__exit__(None, None, None)
    assert not fake_torch.autograd_threads()
    second.__exit__(None, None, None)
    assert fake_torch.autograd_threads()


def test_backward_runs_as_before_after_a_region_that_another_thread_left(
    saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    region = saver.region("a")
    region.__enter__()
    with pytest.warns(RuntimeWarning, match="another thread"):
        in_thread(lambda: region.__exit__(None, None, None))
    with saver.region("b"):
        assert not fake_torch.autograd_threads()
    assert fake_torch.autograd_threads()


def test_backward_runs_as_before_after_a_failed_entry(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.fail_begin_of_new_pools_on = 0
    with pytest.raises(RuntimeError, match="injected failure"):
        saver.region("a").__enter__()
    assert fake_torch.autograd_threads()


# disable


def test_disable_gives_ordinary_memory_that_is_released_at_its_exit(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        cached = fake_torch.allocate(2 * MIB)
        fake_torch.free(cached)
        with saver.disable():
            assert _core.region_current().managed is False
            gone, kept = fake_torch.allocate(2 * MIB), fake_torch.allocate(2 * MIB)
            assert cached not in (gone, kept), "managed memory of the region must not be handed out"
            fake_torch.free(gone)
        addresses = {row.address for row in fake_torch.rows}
        assert gone not in addresses
        assert kept in addresses
        inside = fake_torch.allocate(2 * MIB)
    assert _core.find(inside) is not None
    assert _core.find(kept) is None


def test_disable_outside_is_an_error(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with pytest.raises(errors.InvalidStateError, match=r"disable\(\)"):
        saver.disable()


def test_a_region_inside_disable_is_managed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"), saver.disable(), saver.region("b"):
        fake_torch.allocate(2 * MIB)
    assert resident(saver, "b") == 2 * MIB


def test_an_interrupted_suspension_routes_again(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_routing = store._end_routing

    def interrupt(*arguments: Any) -> None:
        end_routing(*arguments)
        raise KeyboardInterrupt

    with saver.region("a"):
        routed = list(fake_torch.routings)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_end_routing", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.empty_torch_cache(fake_torch)  # type: ignore[arg-type]
        assert fake_torch.routings == routed
