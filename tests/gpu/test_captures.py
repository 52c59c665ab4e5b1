"""Guards captures that other threads have in flight, seen and unseen: the effect of a pause, a resume and a free on them,
and the detection of a capture that is not ended properly."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpu_support import MIB, assert_same, core, driver, empty, errors, saver, state_of, torch, write_and_check

MODES = ("global", "thread_local", "relaxed")
_SECONDS = 60
_RELAXED = 2


@contextlib.contextmanager
def on_another_thread(enter: Callable[[], Any], leave: Callable[[Any], None]) -> Iterator[None]:
    """Runs `enter` and, at the end of the block, `leave` with its result, both on one other thread. The block raises what
    they raise."""
    entered, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            result = enter()
            entered.set()
            assert over.wait(_SECONDS)
            leave(result)
        except BaseException as error:
            failures.append(error)
        finally:
            entered.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(_SECONDS)
    try:
        if not failures:
            yield
    finally:
        over.set()
        thread.join(_SECONDS)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


@contextlib.contextmanager
def plain_capture(mode: str = "global") -> Iterator[None]:
    """While another thread captures by PyTorch's own means. At the end the graph must be valid."""
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(4096, device="cuda")
    results = []

    def enter() -> Any:
        context = torch.cuda.graph(graph, capture_error_mode=mode)
        context.__enter__()
        results.append(tensor + 1)
        return context

    with on_another_thread(enter, lambda context: context.__exit__(None, None, None)):
        yield
    graph.replay()
    torch.cuda.synchronize()
    assert bool((results[0] == 2).all())


@contextlib.contextmanager
def unseen_capture(expected: int = 0) -> Iterator[None]:
    """While another thread captures in global mode by the driver's functions. `expected`: what the end returns."""
    library, target = driver(), torch.zeros(4096, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    def enter() -> None:
        torch.cuda.current_device()
        torch.cuda.set_stream(stream)
        torch.cuda.current_stream().query()  # The thread has a context from here on.
        assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), 0) == 0
        address = ctypes.c_uint64(target.data_ptr())
        assert library.cuMemsetD8Async(address, 7, ctypes.c_size_t(4096), ctypes.c_void_p(stream.cuda_stream)) == 0

    def leave(_: None) -> None:
        graph = ctypes.c_void_p()
        assert library.cuStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph)) == expected
        assert bool(graph.value) == (expected == 0)
        if graph.value:
            assert library.cuGraphDestroy(graph) == 0

    with on_another_thread(enter, leave):
        yield


def weights_and_cache() -> tuple[torch.Tensor, torch.Tensor]:
    """Active weights with a backup, and a paused cache with contents in a backup."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(16 * MIB)
    with saver.region(tag="kv_cache", enable_cpu_backup=True):
        cache = empty(16 * MIB)
    weights.fill_(3)
    cache.fill_(4)
    saver.pause("kv_cache")
    return weights, cache


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_capture_of_another_thread_is_seen_and_survives(mode: str) -> None:
    weights, cache = weights_and_cache()
    bystander = torch.full((4096,), 5.0, device="cuda")
    with plain_capture(mode):
        assert core.counters()["visible_captures"] == 1
        with pytest.raises(
            errors.CaptureInProgressError, match=r"^pause: a stream capture is under way\. End the capture first"
        ):
            saver.pause("weights")
        with pytest.raises(errors.CaptureInProgressError, match=r"^resume: a stream capture is under way\. End the capture"):
            saver.resume("kv_cache")
        assert (state_of(weights), state_of(cache)) == (core.STATE_ACTIVE, core.STATE_PAUSED)
    assert core.counters()["visible_captures"] == 0
    saver.pause("weights")
    saver.resume()
    assert bool((weights == 3).all()) and bool((cache == 4).all())
    assert_same(bystander, torch.full((4096,), 5.0))


def test_a_region_of_another_thread_does_not_break_a_capture() -> None:
    with plain_capture(), saver.region(tag="weights"):
        tensor = empty(16 * MIB)
    assert core.find(tensor.data_ptr()) is not None


def test_a_resume_spares_a_capture_that_it_cannot_see() -> None:
    _, cache = weights_and_cache()
    with unseen_capture():
        assert core.counters()["visible_captures"] == 0
        assert saver.resume("kv_cache").copied_bytes >= 16 * MIB
    assert bool((cache == 4).all())


def test_a_pause_beside_a_capture_that_it_cannot_see_changes_nothing() -> None:
    """Waiting for a whole device breaks any capture: that is why captures should be seen."""
    invalidated = 901
    weights, _ = weights_and_cache()
    with unseen_capture(invalidated), pytest.raises(errors.CaptureInProgressError, match="cuCtxSynchronize"):
        saver.pause("weights")
    assert state_of(weights) == core.STATE_ACTIVE
    assert bool((weights == 3).all())
    saver.resume()


def test_a_capture_that_does_not_begin_is_none() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError):
        graph.capture_begin(capture_error_mode="no such mode")
    with pytest.raises(RuntimeError):  # torch refuses its default stream.
        graph.capture_begin()
    assert core.counters()["visible_captures"] == 0
    with saver.region(tag="weights"):
        tensor = empty(MIB)
    assert saver.pause("weights").allocations == 1
    saver.resume()
    write_and_check(tensor, 1)


def test_a_capture_whose_graph_is_deleted_continues() -> None:
    """torch leaves the stream capturing, and it is seen as such as long as it is."""
    with saver.region(tag="weights"):
        tensor = empty(MIB)
    library, stream = driver(), torch.cuda.Stream()
    torch.cuda.synchronize()
    assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), _RELAXED) == 0
    # As a capture of torch's that is never ended: announced, and begun.
    identity = core.capture_begin_on(stream.cuda_stream) if not core.preloaded else 0
    ended = ctypes.c_void_p()
    if identity:
        with pytest.raises(errors.CaptureInProgressError):
            saver.pause("weights")
    assert library.cuStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(ended)) == 0
    assert library.cuGraphDestroy(ended) == 0
    assert saver.pause("weights").allocations == 1
    assert core.counters()["visible_captures"] == 0
    assert not core.capture_end(identity) if identity else True
    saver.resume("weights")
    del tensor


def leave_pool(pool: Any) -> None:
    """The effect of a failing capture_end, at least up to PyTorch 2.11."""
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    leave = getattr(torch._C, "_cuda_endAllocateToPool", older)
    with contextlib.suppress(RuntimeError):  # it was left
        leave(torch.cuda.current_device(), pool)


def test_an_end_that_only_the_driver_sees_is_detected() -> None:
    with saver.region(tag="weights"):
        tensor = empty(MIB)
    stream, ended = torch.cuda.Stream(), ctypes.c_void_p()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        assert core.counters()["visible_captures"] == 1
        assert driver().cuStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(ended)) == 0
        assert driver().cuGraphDestroy(ended) == 0
    assert saver.pause("weights").allocations == 1
    assert core.counters()["visible_captures"] == 0
    saver.resume("weights")
    with pytest.raises(RuntimeError), torch.cuda.stream(stream):
        graph.capture_end()
    leave_pool(pool)
    assert core.counters()["visible_captures"] == 0
    del graph, tensor


def test_captures_of_several_threads_end_in_any_order() -> None:
    with saver.region(tag="weights"):
        tensor = empty(MIB)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    targets = [torch.zeros(64, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()

    def capture(which: int) -> contextlib.AbstractContextManager[None]:
        def enter() -> None:
            torch.cuda.set_stream(streams[which])
            graphs[which].capture_begin(capture_error_mode="relaxed")
            targets[which].fill_(which + 1)

        return on_another_thread(enter, lambda _: graphs[which].capture_end())

    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(capture(0))
        second.enter_context(capture(1))
        assert core.counters()["visible_captures"] == 2
        first.close()  # Not the one that began last.
        assert core.counters()["visible_captures"] == 1
        with pytest.raises(errors.CaptureInProgressError):
            saver.pause("weights")
    assert core.counters()["visible_captures"] == 0
    assert saver.pause("weights").allocations == 1
    saver.resume("weights")
    for which, graph in enumerate(graphs):
        graph.replay()
        torch.cuda.synchronize()
        assert bool((targets[which] == which + 1).all())
    del tensor


def test_graphed_callables_are_seen() -> None:
    """And each of their captures is over when they are made."""
    with saver.region(tag="weights"):
        tensor = empty(MIB)
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            seen.append(core.counters()["visible_captures"])
        return x * 2

    sample = torch.ones(64, device="cuda")
    graphed = torch.cuda.make_graphed_callables(double, (sample,))
    assert seen == [1]
    assert core.counters()["visible_captures"] == 0
    assert bool((graphed(torch.full((64,), 3.0, device="cuda")) == 6).all())
    assert saver.pause("weights").allocations == 1
    saver.resume("weights")
    del graphed, tensor
    gc.collect()


def test_torch_looks_as_it_did() -> None:
    parameters = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert list(parameters)[:3] == ["self", "pool", "capture_error_mode"]  # recent releases have another one
    assert list(inspect.signature(torch.cuda.CUDAGraph.capture_end).parameters) == ["self"]

    class OwnGraph(torch.cuda.CUDAGraph):  # type: ignore[misc, name-defined]
        begun = 0

        def capture_begin(self, *arguments: Any, **keywords: Any) -> None:
            self.begun += 1
            super().capture_begin(*arguments, **keywords)

    graph, tensor = OwnGraph(), torch.ones(64, device="cuda")
    with torch.cuda.graph(graph):
        result = tensor + 1
        assert core.counters()["visible_captures"] == 1
    assert graph.begun == 1 and core.counters()["visible_captures"] == 0
    graph.replay()
    assert bool((result == 2).all())


def test_a_graph_that_is_kept_captures_as_any() -> None:
    if not hasattr(torch.cuda.CUDAGraph, "instantiate"):
        pytest.skip(f"PyTorch {torch.__version__} keeps no graph")
    graph, tensor = torch.cuda.CUDAGraph(keep_graph=True), torch.ones(64, device="cuda")
    with torch.cuda.graph(graph):
        result = tensor + 1
        assert core.counters()["visible_captures"] == 1
    assert core.counters()["visible_captures"] == 0
    graph.instantiate()
    graph.replay()
    assert bool((result == 2).all())


def test_cuda_graph_counts_once() -> None:
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
    with saver.cuda_graph(graph, tag="cuda_graph"):
        result = tensor + 1
        assert core.counters()["visible_captures"] == 1
    assert core.counters()["visible_captures"] == 0
    graph.replay()
    assert bool((result == 2).all())
    del graph, result


# ---- before a capture begins ----


@pytest.fixture
def before_begin(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What another thread does while torch.cuda.graph synchronizes, before it begins its capture."""
    work: list[Callable[[], object]] = []
    synchronize = torch.cuda.synchronize

    def synchronize_and_let_others_work(*arguments: Any) -> None:
        synchronize(*arguments)
        while work:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work.pop()).result()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize_and_let_others_work)
    return work


def test_a_capture_is_one_from_its_begin_on(before_begin: list[Callable[[], object]]) -> None:
    """Until then pauses are not refused, and frees are not deferred."""
    weights, cache = weights_and_cache()
    seen: list[int] = []

    def work() -> None:
        seen.append(core.counters()["visible_captures"])
        seen.append(saver.pause("weights").allocations)
        saver.resume()

    before_begin.append(work)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        doubled = weights * 2
        assert core.counters()["visible_captures"] == 1
    assert seen == [0, 1]
    graph.replay()
    assert bool((doubled == 6).all()) and bool((cache == 4).all())
    del graph, doubled


def captured_sum(tensor: torch.Tensor, token: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, pool=token, tag="graphs"):
        result = (tensor * 2) + 1
    return graph, result


def test_a_pool_that_is_paused_before_the_begin_is_not_captured_into(before_begin: list[Callable[[], object]]) -> None:
    tensor, stream, token = torch.ones(1 << 20, device="cuda"), torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    first = captured_sum(tensor, token)
    before_begin.append(lambda: saver.pause("graphs"))
    with pytest.raises(errors.InvalidStateError, match="resume tag 'graphs' before capturing into it again"):
        captured_sum(tensor, token)
    assert core.counters()["visible_captures"] == 0
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    saver.resume()
    before_begin.append(lambda: (saver.pause("graphs"), saver.resume("graphs")))
    second = captured_sum(tensor, token)
    for graph, result in (first, second):
        graph.replay()
        assert bool((result == 3).all())
    del first, second, graph, result


def test_a_new_pool_is_captured_into_although_its_tag_is_paused_meanwhile(
    before_begin: list[Callable[[], object]],
) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    first = captured_sum(tensor, None)
    before_begin.append(lambda: saver.pause("graphs"))
    second = captured_sum(tensor, None)
    second[0].replay()
    assert bool((second[1] == 3).all())
    saver.resume()
    first[0].replay()
    assert bool((first[1] == 3).all())
    del first, second


# ---- captures that fail ----


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    """PyTorch's exit fails before it has restored the stream, the routing and the random generator."""
    tensor, before = torch.ones(4, device="cuda"), torch.cuda.current_stream()
    torch.rand(3, device="cuda")
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="previous error during capture"), saver.cuda_graph(graph, tag="graph"):
            doubled = tensor * 2
            doubled.sum().item()
        assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
        assert core.counters()["visible_captures"] == 0
        torch.rand(3, device="cuda")
        doubled = graph = None
        gc.collect()
        saver.empty_cache()
        assert [row for row in core.segments() if row.tag == "graph"] == []
    with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graph"):
        tensor.random_()
