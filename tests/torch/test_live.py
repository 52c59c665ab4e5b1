"""Guards live bytes with every release of PyTorch: its snapshot, where captures inside regions allocate, and which pools of
PyTorch have blocks that show their contents."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pooled_tensors import addresses, another_thread_inside, empty

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
SIZES = [64 << 10, 200_000, 3 * MIB, 64 << 10, 8 * MIB, 512, 5 * MIB + 512, 640 << 10]


pytestmark = pytest.mark.usefixtures("clean_device")


def live_bytes(tag: str) -> int:
    managed = {row.address for row in _core.segments() if row.tag == tag}
    return sum(int(row["active_size"]) for row in torch.cuda.memory_snapshot() if row["address"] in managed)


def all_bytes(tag: str) -> int:
    return sum(row.bytes for row in _core.segments() if row.tag == tag)


def values(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bytes_at(address: int, size: int) -> torch.Tensor:
    """The bytes on the device, also if the memory has another owner now. The device is simulated: its addresses are the
    host's."""

    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
    raw = type("Raw", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(raw, device="cuda").cpu()


def test_live_blocks_alone_are_copied() -> None:
    with saver.region(tag="live", enable_cpu_backup=True):
        tensors: list[Any] = [values(size, seed).cuda() for seed, size in enumerate(SIZES)]
    del tensors[::2]
    expected = [values(size, seed) for seed, size in enumerate(SIZES)][1::2]
    for _ in range(2):
        report = saver.pause("live")
        assert report.copied_bytes == live_bytes("live") < all_bytes("live")
        saver.resume("live")
        assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))
    assert saver.pause("live", live_only=False).copied_bytes == all_bytes("live")
    saver.resume("live")
    assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))


def test_a_block_that_waits_for_a_stream_is_live() -> None:
    side = torch.cuda.Stream()
    host = values(256 << 10, 1)
    with saver.region(tag="live", enable_cpu_backup=True):
        anchor, pending = torch.zeros(1024, device="cuda"), host.cuda()
    with torch.cuda.stream(side):
        pending.add_(1)
        pending.record_stream(side)
    address = pending.data_ptr()
    del pending
    before = live_bytes("live")
    assert before == (256 << 10) + 4096
    assert saver.pause("live").copied_bytes == before
    saver.resume("live")
    assert torch.equal(bytes_at(address, 256 << 10), host + 1)
    del anchor
    torch.zeros(1, device="cuda")  # PyTorch checks its streams when it allocates.


def test_what_a_replay_leaves_in_a_graphs_pool_is_kept() -> None:
    source = torch.arange(1 << 18, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True):
        output = source + 5
    address = output.data_ptr()
    del output
    graph.replay()
    torch.cuda.synchronize()
    assert saver.pause("graph").copied_bytes == all_bytes("graph")
    saver.resume("graph")
    assert torch.equal(bytes_at(address, 2 * MIB).view(torch.int64), torch.arange(1 << 18) + 5)
    del graph


def test_a_capture_inside_a_region_loses_nothing() -> None:
    """Before PyTorch 2.11 its memory may come from the region's pool, which then holds contents that no block shows."""
    source = torch.arange(1 << 18, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag="live", enable_cpu_backup=True):
        kept = values(MIB, 1).cuda()
        with torch.cuda.graph(graph):
            output, anchor = source + 5, source + 6
    address = output.data_ptr()
    del output
    graph.replay()
    torch.cuda.synchronize()
    saver.pause("live")
    saver.resume("live")
    assert torch.equal(bytes_at(address, 2 * MIB).view(torch.int64), torch.arange(1 << 18) + 5)
    assert torch.equal(anchor.cpu(), torch.arange(1 << 18) + 6)
    assert torch.equal(kept.cpu(), values(MIB, 1))
    del graph, anchor


def test_pools_of_the_program_are_copied_whole() -> None:
    """Their memory is managed where cudaMalloc is interposed. Older releases take the region's pool instead."""
    pool = torch.cuda.MemPool()
    with saver.region(tag="live", enable_cpu_backup=True), torch.cuda.use_mem_pool(pool):
        first, gone = values(256 << 10, 1).cuda(), values(256 << 10, 2).cuda()
    address = gone.data_ptr()
    pools = {tuple(row["segment_pool_id"]) for row in torch.cuda.memory_snapshot() if row["address"] == first.data_ptr()}
    is_theirs = pools == {tuple(pool.id)}
    del gone
    live = live_bytes("live")
    report = saver.pause("live")
    assert report.copied_bytes == (all_bytes("live") if is_theirs else live)
    saver.resume("live")
    assert torch.equal(first.cpu(), values(256 << 10, 1))
    if is_theirs:
        assert torch.equal(bytes_at(address, 256 << 10), values(256 << 10, 2))
    del first, pool


# Pools of which a pause copies live blocks only

SIZE = 20 * MIB
#: Returns the addresses of the allocations of which a pause of the tags would copy live blocks only.
Find = Callable[..., list[int]]


@pytest.fixture
def find(store: Any) -> Find:
    from torch_memory_saver._torch.binding import layer
    from torch_memory_saver._torch.memory.live_blocks import live_finder

    def find(*tags: str, every_backup: bool = True) -> list[int]:
        finder = live_finder(layer.require(), store, tags, every_backup)
        assert finder is not None
        live = finder()
        return [] if live is None else sorted(array("Q", live[0]))

    return find


def made_in(tag: str, **options: Any) -> torch.Tensor:
    with saver.region(tag, **options):
        return empty(SIZE)


def test_pools_of_regions_are_thinned(tag: str, find: Find) -> None:
    tags, tensors = [f"{tag}/{name}" for name in ("a", "b", "disk")], []
    for name in tags:
        with saver.region(name, enable_cpu_backup=name.endswith("a"), enable_disk_backup=name.endswith("disk")):
            tensors.append(empty(SIZE))
            assert find(name) == [tensors[-1].data_ptr()], "also while it is routed"
    found = [tensor.data_ptr() for tensor in tensors]
    assert find(*tags) == sorted(found)
    assert find(*tags, every_backup=False) == sorted((found[0], found[2])), "memory without a backup is left out"
    assert find(tags[1], every_backup=False) == []
    with another_thread_inside(f"{tag}/c") as theirs:
        assert find(tags[0]) == [found[0]]
    theirs.clear()


def test_a_retired_pool_is_thinned_until_its_memory_has_gone(tag: str, store: Any, find: Find) -> None:
    def retire() -> torch.Tensor:
        with saver.region(tag):
            gone, kept = empty(SIZE), empty(SIZE)
        del gone
        saver.empty_cache()
        return kept

    before = store.idle_pools.retired_pools()
    kept = retire()
    assert store.idle_pools.select((tag,)) == [pool for pool in store.idle_pools.select((tag,)) if pool.key.device], (
        "it was retired"
    )
    assert find(tag) == [kept.data_ptr()]
    assert len(store.idle_pools.retired_pools() - before) == 1
    del kept
    saver.empty_cache()
    other = made_in(f"{tag}/b")
    assert find(tag, f"{tag}/b") == [other.data_ptr()]
    assert store.idle_pools.retired_pools() <= before, "forgotten"


def test_too_many_retired_pools_are_forgotten(tag: str, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_memory_saver._torch.pools.idle._MAX_RETIRED", 2)
    tensors = []
    for _ in range(3):
        with saver.region(tag):
            gone = empty(SIZE)
            tensors.append(empty(SIZE))
        del gone
        saver.empty_cache()
    assert find(tag) == [tensors[-1].data_ptr()], "the memory of the others is copied whole"


def test_a_region_inside_a_capture_has_a_pool_that_is_not_thinned(tag: str, store: Any, find: Find) -> None:
    before = made_in(tag)
    pools = store.idle_pools.select((tag,))
    graph, source = torch.cuda.CUDAGraph(), torch.ones(1 << 18, device="cuda")
    with saver.cuda_graph(graph, tag=f"{tag}/graph"), saver.region(tag):
        inside = source + 1
    assert store.idle_pools.select((tag,)) == pools
    assert find(tag) == []
    saver.empty_cache()
    assert find(tag, f"{tag}/graph") == [], "for good"
    other = made_in(f"{tag}/b")
    assert find(f"{tag}/b") == [other.data_ptr()]
    del graph, inside, before


def test_a_region_that_is_left_inside_a_capture(tag: str, find: Find) -> None:
    graph, source = torch.cuda.CUDAGraph(), torch.ones(1 << 18, device="cuda")
    region = saver.region(tag)
    region.__enter__()
    tensor = empty(SIZE)
    assert find(tag) == [tensor.data_ptr()]
    with torch.cuda.graph(graph):
        result = source + 1
        region.__exit__(None, None, None)
    assert find(tag) == []
    graph.replay()
    assert bool((result == 2).all())
    del graph, tensor, result


def test_a_pool_that_the_program_captures_into_by_its_id(tag: str, store: Any, find: Find) -> None:
    tensor = made_in(tag)
    (pool,) = [pool for pool in store.idle_pools.select((tag,)) if pool.key.device == 0]
    assert find(tag) == [tensor.data_ptr()]
    graph, source = torch.cuda.CUDAGraph(), torch.ones(1 << 18, device="cuda")
    with torch.cuda.graph(graph, pool=pool.id):
        result = source + 1
    assert find(tag) == []
    del graph, result
    gc.collect()
    assert find(tag) == [], "for good"
    del tensor, pool
    assert len(addresses(tag)) >= 1


# The blocks of managed memory


def blocks_of(tag: str, store: Any) -> list[Any]:
    from torch_memory_saver._torch.binding import layer
    from torch_memory_saver._torch.memory.live_blocks import ResumedBlocks, managed_blocks

    rows = [row for row in _core.segments() if row.tag == tag]
    return managed_blocks(layer.require(), store, ResumedBlocks(), rows)


def test_all_blocks_of_a_pool_that_a_capture_has_used(tag: str, store: Any) -> None:
    """PyTorch does not know which of them have contents. It has forgotten the requested size of free ones."""
    graph, source = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    with saver.cuda_graph(graph, tag=tag):
        between = source * 2
        result = between + 1
        del between
    found = blocks_of(tag, store)
    assert all(block.of_graphs for block in found)
    (row,) = [row for row in torch.cuda.memory_snapshot() if row["address"] == found[0].address]
    sizes = {block.address: block.bytes for block in found}
    assert sizes[result.data_ptr()] == 4000
    free = {block["address"]: block["size"] for block in row["blocks"] if block["state"] == "inactive"}
    assert free and free.items() <= sizes.items()
    del graph, result


def test_live_blocks_of_a_region_and_the_frames_of_their_allocation(tag: str, store: Any) -> None:
    with saver.region(tag):
        first = empty(4 * MIB)
        torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
        try:
            gone, second = empty(4 * MIB), empty(3 * MIB - 100)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    del gone
    found = blocks_of(tag, store)
    assert [(block.address, block.bytes, block.of_graphs) for block in found] == [
        (first.data_ptr(), 4 * MIB, False),
        (second.data_ptr(), 3 * MIB - 100, False),
    ]
    assert found[0].frames is None
    assert found[1].frames[0]["name"] == "empty"
