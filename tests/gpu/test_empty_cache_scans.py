"""Guards when ``empty_cache()`` lists PyTorch's blocks, which is slow: never, and without a garbage collection, where no
managed tensor was deleted; and always where a segment became idle, whatever else has changed."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_support import MIB, core, empty, saver, tms, torch, write_and_check

from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL

#: The functions that release idle managed memory outside of regions.
EMPTY_CACHE = [
    pytest.param(lambda: torch.cuda.empty_cache(), id="cuda"),
    pytest.param(lambda: torch.accelerator.empty_cache(), id="accelerator"),
    pytest.param(lambda: tms.empty_cache(), id="ours"),
]
#: Sizes that PyTorch gives a segment of their own, and the segment that tensors of 1 to 10 MiB share.
LARGE, SHARED = 16 * MIB, 20 * MIB


def resident(tag: str = "a") -> int:
    tags = saver.stats().tags
    return tags[tag].resident_bytes if tag in tags else 0


def load(*sizes: int, tag: str = "a") -> list[torch.Tensor]:
    with saver.region(tag=tag):
        return [empty(size) for size in sizes]


def keep_idle(tag: str = "a") -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one pool. Once the second is deleted, its segment stays: it is smaller than the free part of the
    first one's."""
    second, first = load(LARGE, 2 * MIB, tag=tag)
    return first, second


def train() -> None:
    """What a step of training does between two calls: ordinary temporaries."""
    temporaries = [empty(size * MIB) for size in (32, 1, 5)]
    temporaries.pop(0)


@contextlib.contextmanager
def lists() -> Iterator[list[Any]]:
    """Yield the ids of the pools whose blocks PyTorch lists inside; the default pool's id stands for every pool."""
    found = layer.require()
    original, listed = found._memory_snapshot, list[Any]()

    def snapshot(*arguments: Any) -> Any:
        listed.append(tuple(arguments[0][:2]) if arguments else DEFAULT_POOL)
        return original(*arguments)

    found._memory_snapshot = snapshot
    try:
        yield listed
    finally:
        found._memory_snapshot = original


def scans(listed: list[Any]) -> list[Any]:
    """Return the lists of a scan. Others are of pools that are no region's, of which earlier tests may have left some."""
    return [pool for pool in listed if pool in {DEFAULT_POOL, *(pool.id for pool in pool_store().idle_pools.select())}]


@contextlib.contextmanager
def collections() -> Iterator[list[int]]:
    """Yield the generations that Python's garbage collector collects inside."""
    gc.collect()
    started: list[int] = []

    def note(phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            started.append(information["generation"])

    gc.callbacks.append(note)
    try:
        yield started
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("empty_cache", EMPTY_CACHE)
def test_nothing_is_listed_while_no_managed_tensor_is_deleted(empty_cache: Callable[[], None]) -> None:
    tensors = load(*[MIB] * 40, *[LARGE] * 4)
    empty_cache()
    kept = []
    with lists() as listed, collections() as started:
        for _ in range(20):
            train()
            kept.append(empty(3 * MIB))  # what is in use changes as well
            empty_cache()
    assert scans(listed) == []
    assert started == []
    with lists() as listed:
        del tensors[40:]
        empty_cache()
    assert scans(listed), "the lists are counted"
    tensors.clear()
    empty_cache()
    assert resident() == 0


@pytest.mark.parametrize("empty_cache", EMPTY_CACHE)
def test_nothing_is_listed_for_a_pool_that_is_kept_with_an_idle_segment(empty_cache: Callable[[], None]) -> None:
    first, second = keep_idle()
    del second
    empty_cache()
    assert resident() == SHARED + LARGE, "it strands more than it returns"
    with lists() as listed:
        for _ in range(3):
            train()
            empty_cache()
    assert scans(listed) == []
    write_and_check(first, 1)
    del first
    empty_cache()
    assert resident() == 0


def test_no_collection_starts_while_blocks_are_listed() -> None:
    """Each list makes a dict for each block, of which some hundreds start a collection."""
    tensors = load(*[512] * 3000, *[LARGE] * 20)
    tms.empty_cache()
    threshold = gc.get_threshold()
    with lists() as listed, collections() as started:
        for _ in range(20):
            tensors.pop()
            torch.cuda.empty_cache()
    assert scans(listed), "each call has something to release"
    assert resident() < LARGE
    assert started == []
    assert gc.get_threshold() == threshold
    del tensors


def test_what_becomes_idle_in_another_pool_is_found() -> None:
    first, second = keep_idle("a")
    other = load(LARGE, tag="b")
    del second
    tms.empty_cache()
    kept = resident("a")
    other.clear()
    torch.cuda.empty_cache()
    assert (resident("a"), resident("b")) == (kept, 0)
    del first


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_region_that_uses_the_idle_segment_does_not_hide_another(in_thread: bool) -> None:
    """The number of releasable bytes is the same as at the last scan."""
    first, second = keep_idle("a")
    other = load(LARGE, tag="b")
    del second
    torch.cuda.empty_cache()
    again: list[torch.Tensor] = []
    if in_thread:
        thread = threading.Thread(target=lambda: again.extend(load(LARGE)))
        thread.start()
        thread.join(60)
    else:
        again += load(LARGE)
    assert resident("a") == SHARED + LARGE, "it is used again"
    other.clear()
    torch.cuda.empty_cache()
    assert resident("b") == 0
    again.clear()
    del first
    torch.cuda.empty_cache()
    assert resident("a") == 0


def test_a_pause_that_returns_the_idle_segment_does_not_hide_another() -> None:
    first, second = keep_idle("a")
    other = load(LARGE, tag="b")
    del second
    torch.cuda.empty_cache()
    del first
    saver.pause("a")
    saver.resume("a")
    assert resident("a") == 0
    other.clear()
    torch.cuda.empty_cache()
    assert resident("b") == 0


def test_less_stranded_memory_lets_a_pool_go() -> None:
    """The pool itself has not changed: a tensor of a pool that was retired before is deleted."""
    stranding = load(2 * MIB, 4 * SHARED)
    del stranding[1]
    torch.cuda.empty_cache()
    assert resident() == SHARED, "its pool is retired, and strands 18 MiB"
    tensors = load(9 * MIB, 9 * MIB, LARGE)
    del tensors[2]
    for _ in range(2):
        torch.cuda.empty_cache()
        assert resident() == 2 * SHARED + LARGE
    stranding.clear()
    torch.cuda.empty_cache()
    assert resident() == SHARED
    del tensors


def graph_of(size: int) -> torch.cuda.CUDAGraph:
    """A graph whose pool has a segment that looks idle."""
    graph = torch.cuda.CUDAGraph()
    static = torch.ones(size, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        static + 1
    return graph


def test_a_graph_makes_no_pool_of_a_region_listed() -> None:
    tensors = load(LARGE, LARGE)
    graph = graph_of(LARGE)
    torch.cuda.empty_cache()
    with lists() as listed:
        for _ in range(3):
            train()
            torch.cuda.empty_cache()
    assert listed, "the graph's pool is"
    assert scans(listed) == []
    del tensors[0]
    torch.cuda.empty_cache()
    assert resident() == LARGE
    del graph, tensors


def test_the_end_of_a_graph_does_not_hide_what_becomes_idle() -> None:
    tensors = load(LARGE)
    graph = graph_of(LARGE)
    torch.cuda.empty_cache()
    tensors.clear()
    del graph
    torch.cuda.empty_cache()
    assert resident() == 0


def test_a_pool_of_the_program_does_not_hide_what_becomes_idle() -> None:
    tensors = load(LARGE)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        empty(LARGE)
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        again = empty(LARGE)
    tensors.clear()
    torch.cuda.empty_cache()
    assert resident() == 0
    del again, pool


def test_a_graph_in_the_pool_of_a_region_does_not_hide_what_becomes_idle() -> None:
    """A graph may be captured into the pool by its id. On the same stream, it uses the idle segment."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first, second = keep_idle("a")
    other = load(LARGE, tag="b")
    del second
    torch.cuda.empty_cache()
    (pool,) = [pool for pool in pool_store().idle_pools.select(("a",)) if pool.device == 0]
    static = torch.ones(LARGE, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, stream=stream):
        result = static + 1
    assert resident("a") == SHARED + LARGE, "the segment is used"
    other.clear()
    torch.cuda.empty_cache()
    assert resident("b") == 0
    graph.replay()
    write_and_check(result, 2)
    del first, graph, result


@pytest.mark.multigpu
def test_only_the_device_that_has_changed_is_looked_at() -> None:
    empty(MIB, 1)
    with saver.region(tag="a"):
        tensors = [empty(LARGE, device) for device in (0, 1)]
    torch.cuda.empty_cache()
    looked_at = []
    idle_pools = pool_store().idle_pools
    retire_taken = idle_pools.retire_taken
    idle_pools.retire_taken = lambda torch, taken, *by_pool: (
        looked_at.extend({pool.device for pool in taken.pools}),
        retire_taken(torch, taken, *by_pool),
    )[1]
    try:
        torch.cuda.empty_cache()
        assert looked_at == []
        tensors.pop()
        torch.cuda.empty_cache()
        assert looked_at == [1]
    finally:
        del idle_pools.retire_taken
    assert {row.device for row in core.segments()} == {0}
    del tensors


def pool_store() -> Any:
    from torch_memory_saver._engine.process import pool_store

    return pool_store
