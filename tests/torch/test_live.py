"""Guards live bytes with every release of PyTorch: its snapshot, and where captures inside regions allocate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_memory_saver
from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
SIZES = [64 << 10, 200_000, 3 * MIB, 64 << 10, 8 * MIB, 512, 5 * MIB + 512, 640 << 10]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    saver.resume()
    torch_memory_saver.empty_cache()
    assert all(tag.resident_bytes == 0 for tag in torch_memory_saver.stats().tags.values())


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
