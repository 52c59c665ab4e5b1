"""Guards tokens of graph pools that the program made, and captures that use them: `pool=` of cuda_graph()."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpu_support import MIB, assert_same, core, empty, errors, is_managed, pool_snapshot, saver, segment_of, tms, torch

from torch_memory_saver._engine.process import pool_store
from torch_memory_saver._text import binary_size

WIDTH = 1 << 20
BARE = "a token of graph_pool_handle()"
OWN = "the id of a MemPool with our allocator"


class Token:
    """A token, and the objects that must live as long as it is used."""

    def __init__(self, kind: str) -> None:
        saver.pause("nothing")  # the first use makes _impl
        self.pool: Any = torch.cuda.MemPool(saver._impl._hook_util.get_allocator()) if kind == OWN else None
        self.id: tuple[int, int] = torch.cuda.graph_pool_handle() if self.pool is None else self.pool.id


@contextmanager
def symmetric_memory(token: tuple[int, int], pool: Any) -> Iterator[None]:
    """As SGLang does around memory that NCCL registers: inside a capture, routing to the graph's pool is ended by its token,
    another pool is used, and then routing to the token begins again."""
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, token)
    with torch.cuda.use_mem_pool(pool):
        yield
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, token)


class Step:
    """Work to capture: its intermediates lie in the graph's pool, one of them in a pool of its own."""

    def __init__(self) -> None:
        self.input = torch.arange(WIDTH, dtype=torch.int64, device="cuda")
        self.output = torch.zeros(WIDTH, dtype=torch.int64, device="cuda")
        self.symmetric_pool = torch.cuda.MemPool()
        self.kept: list[torch.Tensor] = []

    def capture(self, graph: torch.cuda.CUDAGraph, token: tuple[int, int], symmetric: bool, **keywords: Any) -> None:
        with saver.cuda_graph(cuda_graph=graph, pool=token, stream=torch.cuda.Stream(), tag="cuda_graph", **keywords):
            self.run(token, symmetric)
        if symmetric:  # Routing begun by hand counts as a use of the pool until it is released by hand.
            torch._C._cuda_releasePool(torch.cuda.current_device(), token)

    def run(self, token: tuple[int, int], symmetric: bool) -> None:
        first = self.input * 3
        if symmetric:
            with symmetric_memory(token, self.symmetric_pool):
                shared = first + 1
        else:
            shared = first + 1
        last = shared * 2
        self.output.copy_(last)
        self.kept += [first, shared, last]

    def check(self, *graphs: torch.cuda.CUDAGraph) -> None:
        for graph in graphs:
            self.output.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert_same(self.output, (torch.arange(WIDTH, dtype=torch.int64, device="cuda") * 3 + 1) * 2)


def cycle() -> None:
    """Pauses the graphs' memory, overwrites what they had, and resumes it."""
    assert saver.pause("cuda_graph").allocations > 0
    other = empty(256 * MIB)
    other.fill_(0xFF)
    del other
    torch.cuda.empty_cache()
    saver.resume("cuda_graph")


def pool_addresses(token: tuple[int, int]) -> dict[int, bool]:
    """The segments of a pool in torch's snapshot, and whether each is managed."""
    return {row["address"]: core.find(row["address"]) is not None for row in pool_snapshot(token)}


@pytest.mark.parametrize("kind", [BARE, OWN])
def test_routing_to_the_token_is_ended_and_begun_again_inside_a_capture(kind: str, mode: str) -> None:
    token = Token(kind)
    step = Step()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    if kind == BARE and mode == "torch":
        with pytest.raises(errors.InvalidStateError, match=r"hook mode \"preload\".*MemPool"):
            step.capture(first, token.id, symmetric=True)
        assert core.counters()["visible_captures"] == 0
        step.kept.clear()
        return
    for graph in (first, second):
        step.capture(graph, token.id, symmetric=True)
        assert graph.pool() == token.id
    shown = pool_addresses(token.id)
    assert shown
    assert all(shown.values()), "all of the token's memory is managed, also what was allocated after routing began again"
    # Between the two, torch calls cudaMalloc for a pool without an allocator, as anywhere in a region.
    assert [is_managed(tensor) for tensor in step.kept[:3]] == [True, mode == "preload", True]
    assert {core.find(address).tag for address in shown} == {"cuda_graph"}  # type: ignore[union-attr]
    step.check(first, second)
    cycle()
    step.check(first, second, first)
    del first, second, graph
    step.kept.clear()


@pytest.mark.parametrize("kind", [BARE, OWN])
def test_a_snapshot_of_the_token_shows_its_memory(kind: str, mode: str) -> None:
    if kind == BARE and mode == "torch":
        pytest.skip("only in hook mode preload: torch cannot attach an allocator to a bare token's pool")
    token = Token(kind)
    step = Step()
    graph = torch.cuda.CUDAGraph()
    step.capture(graph, token.id, symmetric=False)
    shown = pool_addresses(token.id)
    assert sorted(shown) == sorted(row.address for row in core.segments() if row.tag == "cuda_graph")
    del graph
    step.kept.clear()


@pytest.mark.parametrize("kind", [BARE, OWN])
def test_a_paused_pool_is_not_captured_into(kind: str) -> None:
    token = Token(kind)
    step = Step()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    step.capture(graph, token.id, symmetric=False)
    saver.pause("cuda_graph")
    with pytest.raises(errors.InvalidStateError, match="resume tag 'cuda_graph'"):
        step.capture(other, token.id, symmetric=False)
    saver.resume("cuda_graph")
    step.capture(other, token.id, symmetric=False)
    assert other.pool() == graph.pool()
    cycle()
    step.check(graph, other)
    del graph, other
    step.kept.clear()


def test_tags_of_one_token_are_paused_apart() -> None:
    token = Token(BARE)
    step = Step()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    step.capture(graph, token.id, symmetric=False)
    step.kept.clear()
    with saver.cuda_graph(other, pool=token.id, tag="other"):
        step.run(token.id, symmetric=False)
    assert {row.tag for row in core.segments()} == {"cuda_graph", "other"}
    saver.pause("cuda_graph")
    step.check(other)
    saver.resume("cuda_graph")
    step.check(graph, other)
    del graph, other
    step.kept.clear()


def test_a_token_that_a_plain_graph_used_first(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    token = Token(BARE)
    step = Step()
    plain, managed = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain, pool=token.id):
        step.run(token.id, symmetric=False)
    if mode == "torch":
        with pytest.raises(errors.InvalidStateError, match=r"not managed.*hook mode \"preload\""):
            step.capture(managed, token.id, symmetric=False)
    else:
        before = pool_addresses(token.id)
        with caplog.at_level(logging.WARNING, "torch_memory_saver"):
            step.capture(managed, token.id, symmetric=False)
        after = pool_addresses(token.id)
        assert not any(before.values())
        assert all(after[address] for address in after.keys() - before.keys())
        assert after.keys() > before.keys(), "the plain graph's tensors are alive: the managed one needs memory of its own"
        size = sum(row["total_size"] for row in pool_snapshot(token.id) if row["address"] in before)
        (message,) = [record.getMessage() for record in caplog.records if "ordinary memory" in record.getMessage()]
        assert f"{binary_size(size)} of graph pool {token.id}" in message
        cycle()
        step.check(managed)
    step.check(plain)
    del plain, managed
    step.kept.clear()


def test_a_token_that_a_plain_graph_uses_after_a_managed_one() -> None:
    token = Token(BARE)
    step = Step()
    managed, plain = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    step.capture(managed, token.id, symmetric=False)
    with torch.cuda.graph(plain, pool=managed.pool()):
        step.run(token.id, symmetric=False)
    cycle()
    step.check(managed, plain, managed)
    del managed, plain
    step.kept.clear()


def test_a_token_while_expandable_segments_are_on() -> None:
    """torch makes them in every pool that has no allocator. They are managed in preload mode; in torch mode another pool
    replaces that of the token."""
    token = Token(BARE)
    step = Step()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        step.capture(graph, token.id, symmetric=False)
        assert all(is_managed(tensor) for tensor in step.kept)
        if core.preloaded:
            step.capture(other, token.id, symmetric=True)
            assert all(is_managed(tensor) for tensor in step.kept)
        else:
            with pytest.raises(errors.InvalidStateError, match="preload library"):
                step.capture(other, token.id, symmetric=True)
        cycle()
        step.check(graph)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    del graph, other
    step.kept.clear()


def test_gradients_in_a_token_are_managed() -> None:
    """Autograd's own threads are in no region: what they allocate in a pool of torch's would be ordinary memory."""
    token = Token(BARE)
    weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, pool=token.id, tag="cuda_graph"):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert is_managed(weight.grad)
    cycle()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((weight.grad == 2).all())
    del graph, weight


def test_memory_of_a_deleted_graph_is_released() -> None:
    token = Token(BARE)
    step = Step()
    graph = torch.cuda.CUDAGraph()
    step.capture(graph, token.id, symmetric=False)
    assert core.counters()["allocations"] > 0
    step.kept.clear()
    del graph
    tms.empty_cache()
    assert core.counters()["allocations"] == 0
    again = torch.cuda.CUDAGraph()
    step.capture(again, token.id, symmetric=False)
    cycle()
    step.check(again)
    del again
    step.kept.clear()


def test_memory_outside_of_the_graphs_pool_is_reported(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Routing to the token is ended and no other pool is used: the default pool grows, and may hand out paused memory."""
    if mode == "torch":
        pytest.skip("only in hook mode preload: torch's default pool is managed there")
    token = Token(BARE)
    graph = torch.cuda.CUDAGraph()
    device = torch.cuda.current_device()
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        with saver.cuda_graph(graph, pool=token.id, tag="cuda_graph"):
            torch._C._cuda_endAllocateToPool(device, token.id)
            outside = [empty(4 * MIB), empty(4 * MIB)]  # in one segment
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, token.id)
        torch._C._cuda_releasePool(device, token.id)
        assert is_managed(outside[0])
        (message,) = [record.getMessage() for record in caplog.records if "default pool" in record.getMessage()]
    segment = segment_of(outside[0])
    assert f"{binary_size(segment.bytes)} of managed memory" in message
    del outside[0]
    report = saver.pause("cuda_graph")
    is_replaced = pool_store.substitutes.target(device) != (0, 0)  # the default pool, with PyTorch 2.11 and later
    assert (report.bytes, report.reusable_bytes) == (segment.bytes, 0 if is_replaced else segment.bytes - 4 * MIB)
    saver.resume("cuda_graph")
    del graph, outside
    torch.cuda.empty_cache()
