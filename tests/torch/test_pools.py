"""Guards regions over PyTorch's pools: which pool an allocation comes from, when a pool is used again, and what a region
changes of a thread. tests/gpu/test_regions.py has what is managed where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_threads import in_thread
from pooled_tensors import DEFAULT_POOL, MIB, addresses, another_thread_inside, empty, pool_of, resident, tag_of

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

pytestmark = pytest.mark.usefixtures("clean_device")

SIZE = 20 * MIB


def multithreaded() -> bool:
    """Return whether a backward() of this thread runs on autograd's own threads."""
    return bool(torch._C._is_multithreading_enabled())


def made_in(*tags: str, device: int = 0, **options: Any) -> list[torch.Tensor]:
    """Allocate one tensor in a region of each tag."""
    tensors = []
    for tag in tags:
        with saver.region(tag, **options):
            tensors.append(empty(SIZE, device))
    return tensors


def test_the_pool_of_a_tag_is_used_again(tag: str, store: Any) -> None:
    tensors = made_in(*[tag] * 5)
    assert len({pool_of(tensor) for tensor in tensors}) == 1
    assert pool_of(tensors[0]) != DEFAULT_POOL
    assert len(store.idle_pools.select((tag,))) == torch.cuda.device_count(), "one for each device"
    assert pool_of(empty(SIZE)) == DEFAULT_POOL
    del tensors


def test_pools_differ_by_tag_backup_place_and_runs(tag: str, store: Any) -> None:
    options: list[dict[str, Any]] = [
        {"tag": tag},
        {"tag": tag, "enable_cpu_backup": True},
        {"tag": tag, "enable_cpu_backup": True, "host_memory": "pool"},
        {"tag": tag, "enable_cpu_backup": True, "host_memory": "retain"},
        {"tag": tag, "enable_disk_backup": True},
        {"tag": f"{tag}/b"},
        {"tag": f"{tag}/b", "runs": False},
    ]
    tensors = []
    for _ in range(2):
        for arguments in options:
            with saver.region(**arguments):
                tensors.append(empty(SIZE))
    pools = [pool_of(tensor) for tensor in tensors]
    assert len(set(pools)) == len(options)
    assert pools[: len(options)] == pools[len(options) :], "each is used again"
    policies = {pool.key.options.host_policy for pool in store.idle_pools.select((tag,)) if pool.key.device == 0}
    assert policies == {_core.HOST_DEFAULT, _core.HOST_POOL, _core.HOST_RETAIN}


@pytest.mark.parametrize("same", [True, False])
def test_regions_nest(tag: str, same: bool) -> None:
    inner_tag = tag if same else f"{tag}/inner"
    with saver.region(tag):
        first = empty(SIZE)
        with saver.region(inner_tag):
            second = empty(SIZE)
        third = empty(SIZE)
    assert pool_of(first) == pool_of(third) != pool_of(second)
    assert [tag_of(tensor) for tensor in (first, second, third)] == [tag, inner_tag, tag]


def test_two_threads_in_one_tag_have_pools_of_their_own(tag: str) -> None:
    with another_thread_inside(tag) as theirs:
        (mine,) = made_in(tag)
        assert pool_of(mine) != pool_of(theirs[0])
    assert resident(tag) == 2 * SIZE
    theirs.clear()


def test_one_object_decorates_nests_and_is_entered_again(tag: str) -> None:
    region = saver.region(tag)
    tensors: list[torch.Tensor] = []

    @region  # type: ignore[operator]
    def work(depth: int) -> None:
        if depth:
            work(depth - 1)
        tensors.append(empty(SIZE))

    work(2)
    for _ in range(2):
        with region, region:
            tensors.append(empty(SIZE))
    assert [tag_of(tensor) for tensor in tensors] == [tag] * 5
    assert _core.region_current().depth == 0
    assert tag_of(empty(SIZE)) is None
    tensors.clear()


def test_an_exception_leaves_every_region(tag: str) -> None:
    with pytest.raises(ZeroDivisionError), saver.region(tag), saver.region(f"{tag}/b"), saver.disable():
        raise ZeroDivisionError
    assert (tag_of(empty(SIZE)), _core.region_current().depth) == (None, 0)


def test_pools_of_every_device_are_used_again(tag: str, store: Any) -> None:
    def entered() -> list[Any]:
        with saver.region(tag), saver.disable(), saver.region(tag):
            pass
        return sorted(pool.id for pool in store.idle_pools.select((tag,)))

    first = entered()
    assert [entered(), entered()] == [first, first]
    devices = sorted(pool.key.device for pool in store.idle_pools.select((tag,)))
    assert devices == [device for device in range(torch.cuda.device_count()) for _ in range(2)]


def test_a_pool_of_one_device_that_is_missing_is_made(tag: str, store: Any) -> None:
    made_in(tag, device=1)
    saver.empty_cache()
    (kept,) = [pool.id for pool in store.idle_pools.select((tag,))]
    assert [pool.key.device for pool in store.idle_pools.select((tag,))] == [0], "that of device 1 had only a deleted tensor"
    with saver.region(tag):
        tensors = [empty(SIZE, device) for device in (0, 1)]
    assert pool_of(tensors[0]) == tuple(kept) != pool_of(tensors[1])
    found = [_core.find(tensor.data_ptr()) for tensor in tensors]
    assert [(row.device, row.tag) for row in found if row is not None] == [(0, tag), (1, tag)]


def test_a_region_of_a_paused_tag_gets_other_pools_on_every_device(tag: str) -> None:
    def on_both() -> list[torch.Tensor]:
        with saver.region(tag):
            return [empty(SIZE, device) for device in (0, 1)]

    first = on_both()
    saver.pause(tag)
    second = on_both()
    saver.resume(tag)
    assert not {pool_of(tensor) for tensor in first} & {pool_of(tensor) for tensor in second}
    assert [tag_of(tensor) for tensor in (*first, *second)] == [tag] * 4


# backward()


@pytest.mark.parametrize("before", [True, False])
def test_backward_runs_on_its_caller_inside_regions(tag: str, before: bool) -> None:
    with torch.autograd.set_multithreading_enabled(before):
        with saver.region(tag):
            assert not multithreaded()
            with saver.disable(), saver.region(tag):
                assert not multithreaded()
            others: list[bool] = []
            in_thread(lambda: others.append(multithreaded()))
            assert others == [True], "another thread has its own setting"
            assert not multithreaded()
        assert multithreaded() is before


def test_backward_runs_as_before_when_the_last_region_is_left(tag: str) -> None:
    first, second = saver.region(tag), saver.region(f"{tag}/b")
    first.__enter__()
    second.__enter__()
    with pytest.warns(RuntimeWarning, match="stays in force"):
        first.__exit__(None, None, None)
    assert not multithreaded()
    second.__exit__(None, None, None)
    assert multithreaded()


def test_backward_runs_as_before_after_a_region_that_another_thread_left(tag: str, store: Any) -> None:
    region = saver.region(tag)
    region.__enter__()
    level = store.regions.stack()[0].ids[0]

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match="another thread"):
            region.__exit__(None, None, None)

    in_thread(leave)
    with saver.region(f"{tag}/b"):
        assert not multithreaded()
    assert multithreaded()
    _core.region_leave(level)  # the native settings stayed with the thread


# What a region, a pause and empty_cache() return


def idle(tag: str, *sizes: int) -> list[int]:
    """Allocate tensors of the tag and delete them, so that PyTorch keeps their segments. Return their addresses."""
    with saver.region(tag):
        tensors = [empty(size * MIB) for size in sizes]
    return [tensor.data_ptr() for tensor in tensors]


def test_empty_cache_inside_regions(tag: str) -> None:
    inner_tag = f"{tag}/inner"
    with saver.region(tag):
        outer = empty(SIZE)
        with saver.region(inner_tag):
            inner, kept = empty(SIZE), empty(SIZE)
            del outer, inner
            saver.empty_cache()
            assert addresses(tag, inner_tag) == [kept.data_ptr()]
            again = empty(SIZE)
        last = empty(SIZE)
    assert [tag_of(tensor) for tensor in (kept, again, last)] == [inner_tag, inner_tag, tag]
    assert pool_of(again) != pool_of(last), "the inner region's pool is in force again, not the outer one's"


def test_pytorchs_cache_goes_when_the_last_thread_leaves_its_region(tag: str) -> None:
    """Before 2.13 PyTorch keeps its own cache while a pool is routed. Managed memory goes back at once."""
    idle(tag, 20)
    with another_thread_inside(f"{tag}/b") as theirs:
        empty(2 * SIZE)
        reserved = torch.cuda.memory_reserved()
        saver.empty_cache()
        kept = 2 * SIZE if torch.__version__ < (2, 13) else 0
        assert (resident(tag), torch.cuda.memory_reserved()) == (0, reserved - 3 * SIZE + kept)
    assert torch.cuda.memory_reserved() == reserved - 3 * SIZE
    theirs.clear()


def test_a_release_inside_a_region_returns_pytorchs_cache(tag: str) -> None:
    from torch_memory_saver.observe.memory import release_cached

    with saver.region(tag):  # the first region of a tag, which returns a large cache
        pass
    empty(2 * SIZE)
    with saver.region(tag):
        kept = empty(SIZE)
        assert release_cached().freed_bytes == 2 * SIZE
        assert tag_of(empty(SIZE)) == tag
    assert tag_of(kept) == tag


def test_a_full_cache_of_another_tag_is_emptied_at_the_entry(tag: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    taken = free * 3 // 5 // MIB
    idle(tag, taken)
    with saver.region(f"{tag}/b"):
        large = empty(taken * MIB)
    assert (resident(tag), large.numel()) == (0, taken * MIB)
    del large


def test_with_room_a_cache_of_another_tag_stays(tag: str) -> None:
    with saver.region(f"{tag}/b"):
        pass
    idle(tag, 100)
    with saver.region(f"{tag}/b"):
        pass
    assert resident(tag) == 100 * MIB


def test_what_is_stranded_is_of_the_tag_and_the_device(tag: str, store: Any) -> None:
    from torch_memory_saver._torch.binding import layer

    found = layer.require()
    kept = []
    for name in (tag, f"{tag}/b"):
        with saver.region(name):
            kept.append(empty(4 * MIB))  # in a segment of 20 MiB
            empty(256 * MIB)  # is worth the rest of that segment
    assert store.idle_pools.stranded_bytes(found, tag, 0) == 16 * MIB
    assert store.idle_pools.stranded_bytes(found, tag, 1) == 0
    assert store.idle_pools.stranded_bytes(found) == saver.stats().stranded_bytes == 32 * MIB


def test_pools_without_memory_are_not_remembered(tag: str, store: Any) -> None:
    before = store.idle_pools.retired_pools()
    for _ in range(100):
        with saver.region(tag):
            empty(SIZE)
    assert store.idle_pools.retired_pools() == before
    assert len(store.idle_pools.select((tag,))) <= torch.cuda.device_count()


def test_memory_goes_with_the_last_tensor_of_a_retired_pool(tag: str, store: Any) -> None:
    with saver.region(tag):
        gone, kept = empty(SIZE), empty(4 * MIB)
    pool = pool_of(kept)
    del gone
    saver.empty_cache()
    assert pool not in {tuple(idle_pool.id) for idle_pool in store.idle_pools.select((tag,))}, "it was retired"
    assert addresses(tag) == [kept.data_ptr()]
    del kept
    saver.empty_cache()
    assert addresses(tag) == []


def test_idle_memory_of_a_retired_pool_is_released_by_a_pause(tag: str) -> None:
    """It was in use when the pool was given up, and PyTorch has not emptied its cache since."""
    with saver.region(tag, enable_cpu_backup=True):
        gone, kept, first = empty(SIZE), empty(SIZE), empty(SIZE)
    del first
    saver.empty_cache()
    assert addresses(tag) == sorted([gone.data_ptr(), kept.data_ptr()])
    del gone
    report = saver.pause(tag)
    assert (report.allocations, report.bytes) == (1, SIZE)
    assert addresses(tag) == [kept.data_ptr()]


# Threads that end inside a region


@pytest.fixture
def ended_inside(tag: str) -> Callable[[], Any]:
    def end() -> tuple[Any, torch.Tensor]:
        """Have a thread enter a region, allocate in it and end. Return the region and the tensor."""
        results: list[Any] = []

        def work() -> None:
            region = saver.region(tag)
            region.__enter__()
            results.extend((region, empty(SIZE)))

        in_thread(work)
        return results[0], results[1]

    return end


def test_a_region_of_an_ended_thread_is_left(
    tag: str, store: Any, ended_inside: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, tensor = ended_inside()
    assert saver.pause(tag, timeout=None).bytes == SIZE
    assert store.regions._admission.frames == {}
    saver.resume(tag)
    with saver.region(tag):
        again = empty(SIZE)
    assert pool_of(again) == pool_of(tensor), "its pool is idle again"
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        f"a thread ended inside region(tag='{tag}'), which is left now: leave a region on its thread, with a with statement"
    ]


def test_cached_memory_is_returned_after_a_thread_ended_inside(tag: str, ended_inside: Callable[[], Any]) -> None:
    _, tensor = ended_inside()
    reserved = torch.cuda.memory_reserved()
    empty(SIZE)
    assert torch.cuda.memory_reserved() == reserved + SIZE
    saver.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    assert pool_of(tensor) != DEFAULT_POOL


def test_the_region_of_an_ended_thread_may_be_left_nevertheless(tag: str, ended_inside: Callable[[], Any]) -> None:
    region, _ = ended_inside()
    saver.pause(tag, timeout=None)
    with pytest.warns(RuntimeWarning, match="left on another thread"):
        region.__exit__(None, None, None)
    saver.resume()
    with region:
        assert tag_of(empty(SIZE)) == tag
