"""Guards CUDA graphs: captured before a pause, replayed right after the resume, with their memory managed too; captures in
flight while another thread pauses or frees."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from gpu_support import (
    MIB,
    assert_close_to,
    assert_same,
    core,
    empty,
    errors,
    fill_normal,
    free_bytes,
    is_managed,
    saver,
    skip_where_the_outer_pool_wins,
    tms,
    torch,
    write_and_check,
)


class Decoder:
    """A little decode step: two matrices, an intermediate that lies in the graph's pool, an output of one's own."""

    def __init__(self, width: int = 1024) -> None:
        with saver.region(tag="weights", enable_cpu_backup=True):
            self.first = torch.empty(width, width, device="cuda")
            self.second = torch.empty(width, width, device="cuda")
        fill_normal(self.first, 1, std=width**-0.5)
        fill_normal(self.second, 2, std=width**-0.5)
        self.input = torch.ones(64, width, device="cuda")
        self.output = torch.zeros(64, width, device="cuda")

    def step(self) -> None:
        hidden = torch.relu(self.input @ self.first)
        spare = hidden.repeat(64, 1)  # makes the graph's pool worth measuring
        mixed = spare[:64] + hidden
        self.output.copy_(mixed @ self.second)

    def warm_up(self) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        expected = self.output.clone()
        self.output.zero_()
        torch.cuda.empty_cache()
        return expected


def graph_bytes() -> int:
    return sum(row.reserved_bytes for row in core.segments() if row.tag == "cuda_graph" and row.state == core.STATE_ACTIVE)


def cycle() -> None:
    """Paused in SGLang's order, everything overwritten, and resumed."""
    for tag in ("weights", "cuda_graph"):
        saver.pause(tag)
    assert core.counters()["resident_bytes"] == 0
    other = empty(256 * MIB)
    other.fill_(0xFF)
    del other
    torch.cuda.empty_cache()
    for tag in ("cuda_graph", "weights"):
        saver.resume(tag)


def test_a_graph_replays_right_after_a_resume() -> None:
    decoder = Decoder()
    expected = decoder.warm_up()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        decoder.step()
    held = graph_bytes()
    assert held > 0, "the graph's pool is managed"
    for _ in range(3):
        before = free_bytes()
        saver.pause("cuda_graph")
        assert_close_to(free_bytes() - before, held, "free memory gained by pausing the graph's pool")
        saver.resume("cuda_graph")
        cycle()
        decoder.output.zero_()
        graph.replay()
        assert_same(decoder.output, expected)
    del graph


def test_a_model_cycle_of_weights_cache_and_graph_with_an_update_in_each() -> None:
    """Roll out by a captured decode step that writes the cache, sleep, wake the weights, update them, wake the rest."""
    steps, width = 3, 1 << 20
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.arange(width, dtype=torch.int64, device="cuda")
    with saver.region(tag="kv_cache"):
        cache = torch.zeros(width, dtype=torch.int64, device="cuda")
    tokens = torch.ones(width, dtype=torch.int64, device="cuda")
    output = torch.zeros(width, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        hidden = weights * tokens + 1
        cache.add_(hidden)
        output.copy_(cache * 2)
    expected = torch.arange(width, dtype=torch.int64)
    addresses = [tensor.data_ptr() for tensor in (weights, cache, hidden)]
    for cycle_number in range(3):
        cache.zero_()
        for step in range(1, steps + 1):
            graph.replay()
            assert torch.equal(output.cpu(), (expected + 1) * step * 2), (cycle_number, step)
        for tag in ("kv_cache", "weights", "cuda_graph"):
            saver.pause(tag)
        assert core.counters()["resident_bytes"] == 0
        training = empty(256 * MIB)
        training.fill_(0xFF)
        del training
        torch.cuda.empty_cache()
        saver.resume("weights")
        assert torch.equal(weights.cpu(), expected), "an update starts from what the weights were"
        weights.mul_(3).add_(cycle_number)
        expected = expected * 3 + cycle_number
        saver.resume(["cuda_graph", "kv_cache"])
        assert [tensor.data_ptr() for tensor in (weights, cache, hidden)] == addresses
    del graph, hidden


def test_two_graphs_share_a_pool_by_a_token_of_the_users() -> None:
    decoder = Decoder()
    expected = decoder.warm_up()
    token = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    held = []
    for graph in (first, second):
        with saver.cuda_graph(cuda_graph=graph, pool=token, stream=stream, capture_error_mode="global", tag="cuda_graph"):
            decoder.step()
        held.append(graph_bytes())
    assert held[0] > 0
    assert held[1] == held[0], "the second capture uses the idle blocks of the first"
    cycle()
    for graph in (first, second, first):
        decoder.output.zero_()
        graph.replay()
        assert_same(decoder.output, expected)
    del first, second, graph


def test_a_graph_shares_the_pool_of_another() -> None:
    decoder = Decoder()
    expected = decoder.warm_up()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with saver.cuda_graph(first, tag="cuda_graph"):
        decoder.step()
    held = graph_bytes()
    with saver.cuda_graph(second, pool=first.pool(), tag="cuda_graph"):
        decoder.step()
    assert graph_bytes() == held
    cycle()
    for graph in (first, second):
        decoder.output.zero_()
        graph.replay()
        assert_same(decoder.output, expected)
    del first, second, graph


def test_memory_of_a_deleted_graph_is_released() -> None:
    numbers = torch.ones(16 * MIB, device="cuda")
    with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="cuda_graph"):
        numbers * 2  # the first capture makes workspaces of cuBLAS, which stay
    tms.empty_cache()
    start = free_bytes()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        result = numbers * 2
    assert is_managed(result)
    assert start - free_bytes() >= 64 * MIB
    del result, graph
    tms.empty_cache()
    assert core.counters()["allocations"] == 0
    assert_close_to(free_bytes(), start, "free memory", slack=32 * MIB)


def test_an_ordinary_graph_captured_inside_a_region() -> None:
    skip_where_the_outer_pool_wins()
    decoder = Decoder()
    expected = decoder.warm_up()
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag="weights", enable_cpu_backup=True), torch.cuda.graph(graph):
        decoder.step()
    saver.pause("weights")
    saver.resume("weights")
    decoder.output.zero_()
    graph.replay()
    assert_same(decoder.output, expected)
    del graph


def test_allocations_of_another_stream_during_a_capture_are_ordinary() -> None:
    source, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graphs", capture_error_mode="relaxed"):
        captured = source + 1
        # PyTorch hands out a few streams in turn: one of them is the capture's.
        other = next(stream for stream in iter(torch.cuda.Stream, None) if stream != torch.cuda.current_stream())
        with torch.cuda.stream(other):
            ordinary = empty(64 * MIB)
    assert is_managed(captured)
    assert not is_managed(ordinary)


def test_managed_graph_inside_a_region_of_another_tag() -> None:
    decoder = Decoder()
    expected = decoder.warm_up()
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag="weights"):
        with saver.cuda_graph(graph, tag="cuda_graph"):
            decoder.step()
        tensor = empty(16 * MIB)
    assert core.find(tensor.data_ptr()).tag == "weights"  # type: ignore[union-attr]
    assert graph_bytes() > 0
    cycle()
    graph.replay()
    assert_same(decoder.output, expected)
    write_and_check(tensor, 1)
    del graph


@pytest.mark.parametrize("ours", [True, False], ids=["cuda_graph", "torch.cuda.graph"])
def test_pause_and_resume_during_a_capture_are_refused_and_the_capture_survives(ours: bool) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(64 * MIB)
    with saver.region(tag="kv_cache"):
        cache = empty(64 * MIB)
    tensor.fill_(3)
    saver.pause("kv_cache")
    result = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    context = saver.cuda_graph(graph, tag="cuda_graph") if ours else torch.cuda.graph(graph)
    with context:
        result.copy_(tensor)
        with pytest.raises(errors.CaptureInProgressError):
            saver.pause("weights")
        with pytest.raises(errors.CaptureInProgressError):
            saver.resume("kv_cache")
        result.add_(1)
    assert core.find(tensor.data_ptr()).state == core.STATE_ACTIVE  # type: ignore[union-attr]
    assert core.find(cache.data_ptr()).state == core.STATE_PAUSED  # type: ignore[union-attr]
    saver.pause("weights")
    saver.resume()
    graph.replay()
    assert bool((result == 4).all())
    write_and_check(cache, 1)
    del graph


def test_pause_from_another_thread_during_a_capture_is_refused() -> None:
    with saver.region(tag="weights"):
        tensor = empty(64 * MIB)
    caught: list[BaseException] = []

    def pause() -> None:
        try:
            saver.pause("weights")
        except BaseException as error:
            caught.append(error)

    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        doubled = tensor * 2
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in caught] == [errors.CaptureInProgressError]
    graph.replay()
    torch.cuda.synchronize()
    assert saver.pause("weights").allocations == 1
    saver.resume("weights")
    del graph, doubled


def test_a_free_during_a_capture_is_deferred_to_its_end() -> None:
    size = 64 * MIB
    tensor = torch.ones(4096, device="cuda")
    address = core.allocate(size)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        result = tensor + 1
        assert core.free(address)
        assert core.find(address) is None
        assert core.counters()["deferred_frees"] == 1
        assert core.counters()["visible_captures"] >= 1
    counters = core.counters()
    assert (counters["deferred_frees"], counters["visible_captures"]) == (0, 0)
    graph.replay()
    assert bool((result == 2).all())
    del graph, result


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    graph = torch.cuda.CUDAGraph()
    tensor = torch.ones(4096, device="cuda")
    with pytest.raises(RuntimeError, match="in the middle"), saver.cuda_graph(graph, tag="cuda_graph"):
        result = tensor + 1
        raise RuntimeError("in the middle")
    assert core.counters()["visible_captures"] == 0
    with saver.region(tag="weights"):
        managed = empty(16 * MIB)
    saver.pause("weights")
    saver.resume("weights")
    write_and_check(managed, 1)
    del graph, result


@pytest.fixture
def busy_collector() -> Any:
    """Python looks for garbage whenever it makes an object that can have references."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_graphs_that_are_garbage_are_not_destroyed_during_a_capture(busy_collector: Any) -> None:
    """The driver would refuse that, and invalidate the capture."""
    source, old, graph = torch.ones(1 << 10, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with saver.cuda_graph(old, tag="cuda_graph"):
        result = source * 2
    with saver.cuda_graph(graph, tag="cuda_graph"):
        cycle: list[Any] = [old]
        cycle.append(cycle)
        del old, cycle
        kept = [[number] for number in range(1000)]
        result = source * 3
    assert len(kept) == 1000
    graph.replay()
    assert bool((result == 3).all())
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="failed"), saver.cuda_graph(torch.cuda.CUDAGraph(), tag="cuda_graph"):
        assert gc.get_threshold()[0] > 1_000_000_000 and gc.isenabled()
        raise RuntimeError("the capture has failed")
    assert gc.get_threshold() == before
    gc.disable()
    try:
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="cuda_graph"):
            result = source * 4
        assert not gc.isenabled(), "the program had stopped it"
    finally:
        gc.enable()
