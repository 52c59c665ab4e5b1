"""Guards that memory of deleted tensors is returned although regions allocated it: by PyTorch's own empty_cache(), when a
region ends, at a pause and at a resume; and that what a pool strands stays small."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from gpu_support import MIB, STARTED_PRELOADED, core, empty, saver, tms, torch, write_and_check
from other_threads import in_thread, other_thread_inside

from torch_memory_saver._torch.memory import cache_wrappers

#: Both functions by which programs empty PyTorch's cache.
EMPTY_CACHE = [
    pytest.param(lambda: torch.cuda.empty_cache(), id="cuda"),
    pytest.param(lambda: torch.accelerator.empty_cache(), id="accelerator"),
]


def resident(tag: str) -> int:
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


def cached_elsewhere() -> int:
    """Bytes of PyTorch's segments without a tensor, outside of this package's pools."""
    managed = {row.address for row in core.segments()}
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] not in managed and not segment["active_size"]
    )


def cache_elsewhere() -> int:
    """Has PyTorch cache 48 MiB outside of regions, after the first region of each tag, which would give back them."""
    for tag in ("a", "b"):
        load(1, tag=tag)
    torch.cuda.empty_cache()
    empty(48 * MIB)
    cached = cached_elsewhere()
    assert cached >= 48 * MIB
    return cached


def load(*sizes: int, tag: str = "a", **options: bool) -> list[torch.Tensor]:
    with saver.region(tag=tag, **options):
        return [empty(size * MIB) for size in sizes]


# -- empty_cache() of PyTorch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty_cache", EMPTY_CACHE)
def test_pytorchs_function_returns_idle_managed_memory(empty_cache: Callable[[], None]) -> None:
    tensors = load(64, 64, 32)
    del tensors[0]
    assert resident("a") == 160 * MIB
    empty_cache()
    assert resident("a") == 96 * MIB
    for value, tensor in enumerate(tensors):
        write_and_check(tensor, value)
    del tensor
    tensors.clear()
    empty_cache()
    assert resident("a") == 0


@pytest.mark.parametrize("empty_cache", EMPTY_CACHE)
def test_empty_cache_returns_memory_that_another_stream_has_used(empty_cache: Callable[[], None]) -> None:
    tensors = load(64)
    tensors[0].record_stream(torch.cuda.Stream())
    tensors.clear()
    empty_cache()
    assert resident("a") == 0


def test_empty_cache_inside_a_region_behaves_as_before() -> None:
    with saver.region(tag="a"):
        keep, idle = empty(32 * MIB), empty(64 * MIB)
        del idle
        torch.cuda.empty_cache()
        assert resident("a") == 96 * MIB
        again = empty(64 * MIB)
    assert resident("a") == 96 * MIB
    del keep, again


def test_empty_cache_while_another_thread_is_in_a_region_behaves_as_before() -> None:
    tensors = load(64)
    with other_thread_inside(saver.region(tag="b")):
        tensors.clear()
        torch.cuda.empty_cache()
        assert resident("a") == 64 * MIB
    torch.cuda.empty_cache()
    assert resident("a") == 0


def test_memory_of_a_captured_graph_stays() -> None:
    static = empty(MIB)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        temporary = static + 1
        result = temporary + 1
        del temporary
    held = resident("graph")
    for value in range(3):
        torch.cuda.empty_cache()
        torch.accelerator.empty_cache()
        static.fill_(value)
        graph.replay()
        assert int(result.max()) == value + 2
    assert resident("graph") == held > 0
    del graph, result


def test_a_pool_of_a_region_that_a_graph_uses_stays() -> None:
    """Its blocks look free to PyTorch, and the replay writes to them."""
    tensors = load(4)
    (memory_pool,) = [pool.memory_pool for pool in layer_store().idle_pools.select(("a",)) if pool.device == 0]
    static = empty(MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory_pool.id):
        result = static + 1
    del memory_pool
    tensors.clear()
    for value in range(2):
        torch.cuda.empty_cache()
        with saver.region(tag="a"):
            pass
        tms.empty_cache()
        static.fill_(value)
        graph.replay()
        assert int(result.max()) == value + 1
    del graph, result
    with saver.region(tag="a"):
        pass


def layer_store() -> object:
    from torch_memory_saver._engine.process import pool_store

    return pool_store


def test_empty_cache_is_wrapped_once_and_restored() -> None:
    kept = load(1)  # so that the pool is not retired when its next region ends
    places = (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory)
    wrapped = [place.empty_cache for place in places]
    assert wrapped[0] is wrapped[1] and wrapped[2] is wrapped[3]
    assert (wrapped[0].__name__, wrapped[0].__module__) == ("empty_cache", "torch.cuda.memory")
    assert "cached memory" in (wrapped[0].__doc__ or "")
    cache_wrappers.install(layer_store())  # type: ignore[arg-type]
    assert [place.empty_cache for place in places] == wrapped
    try:
        cache_wrappers.remove()
        originals = [place.empty_cache for place in places]
        assert originals == [function.__wrapped__ for function in wrapped]
        tensors = load(32)
        tensors.clear()
        torch.cuda.empty_cache()
        assert resident("a") == 34 * MIB
    finally:
        cache_wrappers.install(layer_store())  # type: ignore[arg-type]
    assert torch.cuda.empty_cache is torch.cuda.memory.empty_cache is not originals[0]
    torch.cuda.empty_cache()
    assert resident("a") == 2 * MIB
    del kept


def test_a_wrapper_of_the_program_stays() -> None:
    import functools

    load(1)
    ours = torch.cuda.empty_cache

    @functools.wraps(ours)
    def theirs() -> None:
        ours()

    torch.cuda.empty_cache = theirs
    try:
        cache_wrappers.install(layer_store())  # type: ignore[arg-type]
        assert torch.cuda.empty_cache is theirs
        cache_wrappers.remove()
        assert torch.cuda.empty_cache is theirs
    finally:
        torch.cuda.empty_cache = ours
        cache_wrappers.remove()
        cache_wrappers.install(layer_store())  # type: ignore[arg-type]


def test_empty_cache_may_be_part_of_a_compiled_graph() -> None:
    import torch  # the compiler does not see through the module of the tests

    tensors = load(32)
    targets = []

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        targets.extend(node.target for node in module.graph.nodes)
        return module

    @torch.compile(backend=backend, fullgraph=True)
    def work(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.cuda.empty_cache()
        return y * 2

    tensors.clear()
    assert work(torch.ones(2)).tolist() == [4.0, 4.0]
    assert torch.cuda.empty_cache in targets
    assert resident("a") == 0
    torch._dynamo.reset()


# -- the end of a region -----------------------------------------------------------------------------------------------


def test_idle_memory_goes_back_when_the_outermost_region_ends() -> None:
    cached = cache_elsewhere()
    with saver.region(tag="a"):
        with saver.region(tag="b"):
            first, second = empty(64 * MIB), empty(32 * MIB)
            del first
        assert resident("b") == 96 * MIB
        third = empty(64 * MIB)
        del third
    assert (resident("a"), resident("b")) == (0, 32 * MIB)
    assert cached_elsewhere() == cached, "PyTorch's own cache stays"
    write_and_check(second, 1)
    with saver.region(tag="b"):
        del second
    assert resident("b") == 0


def test_idle_memory_is_returned_while_another_thread_is_in_a_region() -> None:
    kept: list[torch.Tensor] = []

    def keep() -> None:
        kept.append(empty(32 * MIB))

    with other_thread_inside(saver.region(tag="b"), first=keep, last=keep):
        with saver.region(tag="a"):
            empty(64 * MIB)
        assert resident("a") == 0
        tensors = load(64)
        tensors.clear()
        tms.empty_cache()
        assert resident("a") == 0
    for value, tensor in enumerate(kept):
        write_and_check(tensor, value)
    del tensor


def test_many_entries_find_what_was_deleted_in_the_end() -> None:
    tensors = load(32, 32)
    for _ in range(300):
        with saver.region(tag="a"):
            pass
    del tensors[0]
    for _ in range(64):
        with saver.region(tag="a"):
            pass
    assert resident("a") == 32 * MIB


# -- what is stranded --------------------------------------------------------------------------------------------------


def _used_by_cycles(cycles: int, temporary: int, each_cycle: Callable[[], None], nested: bool = False) -> list[int]:
    """Managed bytes after each cycle: a temporary in the region, and a tensor of 1.5 MiB that lives for 40 cycles."""
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=40)
    used = []
    for _ in range(cycles):
        with saver.region(tag="outer") if nested else contextlib.nullcontext(), saver.region(tag="a"):
            empty(temporary * MIB)
            kept.append(empty(3 * MIB // 2))
        saver.pause()
        saver.resume()
        each_cycle()
        used.append(saver.stats().total.resident_bytes)
    return used


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "each_cycle",
    [
        pytest.param(lambda: None, id="pause"),
        pytest.param(lambda: torch.cuda.empty_cache(), id="torch"),
        pytest.param(lambda: tms.empty_cache(), id="ours"),
    ],
)
def test_temporaries_do_not_strand_what_is_kept(each_cycle: Callable[[], None], nested: bool) -> None:
    """Ordinary tensors hold 90 MiB of segments for 60 MiB."""
    used = _used_by_cycles(60, 30, each_cycle, nested)
    assert max(used) <= 1.5 * 90 * MIB
    assert saver.stats().stranded_bytes <= 30 * MIB


def test_threads_and_tags_do_not_strand_more_each() -> None:
    """Three threads, each with a tag of its own."""
    used: list[int] = []
    turns = [threading.Semaphore(value) for value in (1, 0, 0)]

    def work(number: int) -> None:
        kept: collections.deque[torch.Tensor] = collections.deque(maxlen=20)
        for _ in range(40):
            assert turns[number].acquire(timeout=60)
            with saver.region(tag=f"a{number}"):
                empty(30 * MIB)
                kept.append(empty(3 * MIB // 2))
            used.append(resident(f"a{number}"))
            turns[(number + 1) % 3].release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(used) == 120
    assert max(used) <= 120 * MIB


def test_stranded_bytes_are_counted_until_their_segment_is_free() -> None:
    assert saver.stats().stranded_bytes == 0
    with saver.region(tag="a"):
        small, large = empty(4 * MIB), empty(256 * MIB)
        del large
    assert resident("a") == 20 * MIB
    assert saver.stats().stranded_bytes == 16 * MIB
    assert "stranded: 16 MiB of free memory that no allocation can use until" in str(saver.stats())
    saver.pause("a")
    assert saver.stats().stranded_bytes == 16 * MIB
    saver.resume("a")
    write_and_check(small, 5)
    del small
    torch.cuda.empty_cache()
    assert saver.stats().stranded_bytes == 0
    assert resident("a") == 0


# -- tensors that are deleted while they are paused --------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_what_was_deleted_while_paused_is_not_resumed(wait: bool) -> None:
    cached = cache_elsewhere()
    tensors = load(16, 16, 16, 16, enable_cpu_backup=True)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    del tensor
    saver.pause("a")
    del tensors[1:3]
    report = saver.resume("a") if wait else saver.resume("a", wait=False).wait()
    assert (report.allocations, report.bytes, report.copied_bytes) == (2, 32 * MIB, 32 * MIB)
    assert [int(tensor.max()) for tensor in tensors] == [0, 3]
    assert cached_elsewhere() >= cached, "PyTorch's own cache stays"
    saver.pause("a")
    tensors.clear()
    assert saver.resume("a").allocations == 0
    assert resident("a") == 0


def test_what_was_deleted_of_a_retired_pool_while_paused_is_not_resumed() -> None:
    with saver.region(tag="a", enable_cpu_backup=True):
        tensors = [empty(64 * MIB), empty(32 * MIB), empty(16 * MIB)]
        del tensors[0]
    saver.pause("a")
    del tensors[0]
    assert saver.resume("a").copied_bytes == 16 * MIB
    write_and_check(tensors[0], 2)


def test_a_deletion_by_another_thread_inside_a_region_counts() -> None:
    tensors = load(16, 16, enable_cpu_backup=True)
    saver.pause("a")
    in_thread(tensors.clear)
    with saver.region(tag="b"):
        assert saver.resume("a").allocations == 0


@pytest.mark.skipif(not STARTED_PRELOADED, reason="only in hook mode preload: PyTorch's default pool is managed")
def test_what_was_deleted_of_the_default_pool_while_paused_is_not_resumed() -> None:
    """The region's settings without a pool, as the C++ package's callers set them."""
    from torch_memory_saver import _core

    level = _core.region_enter("a", _core.BACKUP_KINDS["pinned"], True)
    tensors = [empty(32 * MIB), empty(32 * MIB)]
    _core.region_leave(level)
    saver.pause("a")
    del tensors[0]
    assert saver.resume("a").copied_bytes == 32 * MIB


# -- PyTorch's counters ------------------------------------------------------------------------------------------------


def test_the_counters_do_not_grow_with_the_pools_that_there_ever_were() -> None:
    """Since 2.13 torch.cuda.memory_stats() has an entry for each pool, also of those that are gone."""
    for _ in range(3):
        load(64)
        tms.empty_cache()
    kept, gone = load(4, 32)
    del gone
    from torch_memory_saver._torch.binding import layer

    torch_cuda = layer.in_use()
    assert torch_cuda is not None
    found, expected = torch_cuda.memory_stats(0), torch.cuda.memory_stats_as_nested_dict(0)
    assert "reserved_bytes_by_private_pools" not in found
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "allocation"):
        assert found[name] == expected[name]
    del kept


# -- messages ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _log(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torch_memory_saver"):
        texts: list[str] = []
        yield texts
        texts += [record.getMessage() for record in caplog.records]


def test_pytorchs_error_is_followed_by_what_empty_cache_would_return(caplog: pytest.LogCaptureFixture) -> None:
    tensors = load(64)
    tensors.clear()
    with _log(caplog) as texts, pytest.raises(torch.OutOfMemoryError):
        empty(1 << 44)
    assert any("empty_cache() would give back 64 MiB of idle managed memory of device 0" in text for text in texts), texts
    tms.empty_cache()
    with _log(caplog) as texts, saver.region(tag="b"):
        inside = empty(32 * MIB)
        del inside
        with pytest.raises(torch.OutOfMemoryError):
            empty(1 << 44)
    assert any("would give back 32 MiB" in text for text in texts), texts
    tms.empty_cache()
    with _log(caplog) as texts, pytest.raises(torch.OutOfMemoryError):
        empty(1 << 44)
    assert not any("would give back" in text for text in texts)


def test_an_emptying_that_is_put_off_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 2.13 PyTorch empties its cache while another thread is in a region, and there is nothing to log."""
    cached = cache_elsewhere()
    monkeypatch.setattr(layer_store(), "_has_logged_deferred_emptying", False)
    is_put_off = torch.__version__ < (2, 13)
    with other_thread_inside(saver.region(tag="a")):
        with _log(caplog) as texts:
            tms.empty_cache()
            tms.empty_cache()
        assert (cached_elsewhere() == cached) == is_put_off
    assert ["region(tag='a')" in text for text in texts] == [True] * is_put_off
    with _log(caplog) as texts:
        tms.empty_cache()
    assert texts == []


def test_memory_freed_inside_disable_is_returned_there() -> None:
    """As a weight update of an engine needs it: buffers of one size, and then a larger one."""
    with saver.region(tag="outer"):
        outer = empty(16 * MIB)
        with saver.disable():
            kept, gone = empty(10 * MIB), [empty(24 * MIB) for _ in range(4)]
            kept.fill_(3)
            before = torch.cuda.memory_reserved()
            del gone
            tms.empty_cache()
            assert torch.cuda.memory_reserved() == before - 96 * MIB
            later = empty(32 * MIB)
            assert core.find(later.data_ptr()) is None, "the region inside is still disabled"
            assert core.find(kept.data_ptr()) is None
            write_and_check(later, 4)
            assert int(kept.min()) == int(kept.max()) == 3
            del kept, later
        again = empty(16 * MIB)
        assert core.find(again.data_ptr()) is not None
    assert torch.cuda.memory_reserved() == before - (96 + 10 - 16) * MIB
    del outer, again
