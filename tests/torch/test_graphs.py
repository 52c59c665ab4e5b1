"""Guards the pools of captures: which captures share one, when it is released, and what a failing one leaves as it was.
tests/gpu/test_graphs.py and test_graph_tokens.py replay such graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pooled_tensors import MIB, addresses, empty, pool_of, tag_of

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

pytestmark = pytest.mark.usefixtures("clean_device")

SIZE = 20 * MIB


@pytest.fixture
def source() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8, device="cuda")


def captured(source: torch.Tensor, **options: Any) -> torch.cuda.CUDAGraph:
    """Capture a graph and delete its result, so that the next capture into its pool uses the same memory."""
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, **options):
        source + 1
    return graph


def test_which_captures_share_a_pool(tag: str, source: torch.Tensor) -> None:
    token = torch.cuda.graph_pool_handle()
    graphs = [captured(source, tag=tag, pool=token) for _ in range(2)]
    graphs.append(captured(source, tag=tag, pool=graphs[0].pool()))
    assert graphs[0].pool() == graphs[1].pool() == graphs[2].pool()
    assert (graphs[0].pool() == token) is _core.preloaded, "PyTorch cannot give a token's pool another allocator"
    assert len(addresses(tag)) == 1, "they use each other's idle memory"
    others = [
        captured(source, tag=f"{tag}/b", pool=token),
        captured(source, tag=tag, pool=token, enable_cpu_backup=True),
        captured(source, tag=tag),
        captured(source, tag=tag),
    ]
    assert len({graph.pool() for graph in (graphs[0], *others)}) == 5
    backups = sorted(row.backup for row in _core.segments() if row.tag == tag)
    assert backups == [_core.BACKUP_NONE] * 3 + [_core.BACKUP_PINNED]
    assert len(addresses(f"{tag}/b")) == 1
    graphs.clear()
    others.clear()


def test_a_pool_is_released_with_its_last_graph(tag: str, source: torch.Tensor) -> None:
    token = torch.cuda.graph_pool_handle()
    graphs = [captured(source, tag=tag, pool=token) for _ in range(2)]
    for _ in range(2):
        saver.empty_cache()
        assert len(addresses(tag)) == 1, "a replay uses memory that PyTorch shows as idle"
        graphs.pop()
        gc.collect()
    saver.empty_cache()
    assert addresses(tag) == []
    again = captured(source, tag=tag, pool=token)
    assert len(addresses(tag)) == 1
    again.replay()
    del again


def test_a_capture_begins_with_an_empty_cache(tag: str, source: torch.Tensor) -> None:
    with saver.region(tag):
        kept, idle = empty(SIZE), empty(2 * SIZE)
        del idle
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag=f"{tag}/graph"):
            source.add_(1)
            assert addresses(tag) == [kept.data_ptr()]


def test_an_exception_in_a_capture_leaves_the_region_around_it_in_force(tag: str, store: Any, source: torch.Tensor) -> None:
    with saver.region(tag):
        with pytest.raises(ZeroDivisionError), saver.cuda_graph(torch.cuda.CUDAGraph(), tag=f"{tag}/graph"):
            source.add_(1)
            raise ZeroDivisionError
        assert (_core.region_current().tag, len(store.regions.stack())) == (tag, 1)
        inside = empty(SIZE)
    assert tag_of(inside) == tag
    assert _core.counters()["visible_captures"] == 0


def test_pytorchs_own_errors_about_routings_stay(tag: str, source: torch.Tensor) -> None:
    """A capture explains the end of a routing to its token only if it has put another pool in its place."""
    token, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    with (
        pytest.raises(RuntimeError, match="not currently recording") as ended,
        saver.cuda_graph(torch.cuda.CUDAGraph(), tag=tag),
    ):
        source.add_(1)
        torch._C._cuda_endAllocateToPool(device, token)
    with (
        pytest.raises(RuntimeError, match="already recording") as begun,
        saver.cuda_graph(torch.cuda.CUDAGraph(), pool=token, tag=tag),
    ):
        inside = source + 1
        pool = pool_of(inside)
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)  # PyTorch has counted a use before it refused
    assert (ended.type, begun.type) == (RuntimeError, RuntimeError)
    del inside
