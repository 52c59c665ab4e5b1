"""Guards the wrappers around the functions with which PyTorch's Python code begins and ends captures."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from core_regions import core_region
from interruptions import every_interruption

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.captures import capture_gate, watch_captures
from torch_memory_saver.errors import InvalidStateError

STREAM = 1 << 40


class Failure(Exception):
    pass


def visible() -> int:
    return int(_core.counters()["visible_captures"])


@pytest.fixture
def torch(simulator: Any) -> SimpleNamespace:
    """The wrapped part of torch: a class whose functions do what the test sets."""

    class Graph:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> str:
            """The documentation of the begin."""
            module.seen.append(("begin", visible(), pool, capture_error_mode))
            if module.fails:
                raise Failure
            return "begun"

        def capture_end(self) -> str:
            module.seen.append(("end", visible()))
            if module.fails:
                raise Failure
            return "ended"

        def capture_end_pre(self) -> None:
            """Recent releases of PyTorch call this instead, before they instantiate the graph."""
            module.seen.append(("end, not instantiated", visible()))

    module = SimpleNamespace(
        _C=SimpleNamespace(
            _CUDAGraph=Graph, _cuda_getDevice=lambda: 0, _cuda_getCurrentRawStream=lambda device: module.stream + device
        ),
        seen=[],
        fails=False,
        stream=STREAM,
    )
    watch_captures(module)
    return module


def test_a_capture_is_known_from_before_its_begin_to_its_end(torch: SimpleNamespace) -> None:
    graph = torch._C._CUDAGraph()
    assert graph.capture_begin("pool", capture_error_mode="relaxed") == "begun"
    assert visible() == 1
    assert graph.capture_end() == "ended"
    assert visible() == 0
    assert torch.seen == [("begin", 1, "pool", "relaxed"), ("end", 1)]


def test_a_begin_that_fails_while_too_many_are_under_way_ends_no_other_capture(torch: SimpleNamespace) -> None:
    identities = [_core.capture_begin(None, _core.BACKUP_NONE) for _ in range(16)]
    running = [_core.capture_begin_on(STREAM + 1 + number) for number in range(16)]  # none is only announced
    torch.fails = True
    with pytest.raises(Failure):
        torch._C._CUDAGraph().capture_begin()
    assert visible() == 16
    for identity in (*identities, *running):
        assert _core.capture_end(identity)
    assert visible() == 0


def test_a_begin_that_was_interrupted_when_the_capture_had_begun_is_ended_with_its_graph(
    torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, graphs = _core.capture_end, []

    def goes_on() -> bool:
        return bool(torch.seen) and torch.seen[-1][0] == "begin"

    def end_unless(identity: int, unless_it_goes_on: bool = False) -> bool:
        return not (unless_it_goes_on and goes_on()) and end(identity)

    def use() -> None:
        graphs.append(torch._C._CUDAGraph())
        graphs[-1].capture_begin()

    monkeypatch.setattr(_core, "capture_end", end_unless)
    begun = []
    for place in every_interruption(use):
        begun.append(goes_on())
        assert visible() == begun[-1], place
        if begun[-1]:
            graphs[-1].capture_end()
        assert visible() == 0, place
        torch.seen.clear()
    assert begun.count(True) > 5 and begun.count(False) > 20


def test_an_end_that_was_interrupted_when_the_capture_had_ended_is_reported(torch: SimpleNamespace) -> None:
    graphs = []

    def use() -> None:
        graphs[-1].capture_end()

    def begin() -> None:
        graphs.append(torch._C._CUDAGraph())
        graphs[-1].capture_begin()
        torch.seen.clear()

    begin()
    ended = []
    for place in every_interruption(use):
        ended.append(bool(torch.seen))
        assert not visible() or not ended[-1], place
        begin()
    assert ended.count(True) > 5 and ended.count(False) > 5
    assert visible() == 0


def test_the_first_of_two_steps_ends_a_capture(torch: SimpleNamespace) -> None:
    graph = torch._C._CUDAGraph()
    graph.capture_begin()
    graph.capture_end_pre()
    assert visible() == 0
    assert torch.seen[1:] == [("end, not instantiated", 1)]


def test_a_release_without_that_step_has_none_afterwards(simulator: Any) -> None:
    class Graph:
        def capture_begin(self) -> None: ...
        def capture_end(self) -> None: ...

    watch_captures(
        SimpleNamespace(_C=SimpleNamespace(_CUDAGraph=Graph, _cuda_getDevice=None, _cuda_getCurrentRawStream=None))
    )
    assert not hasattr(Graph, "capture_end_pre")


def test_wrapping_twice_is_wrapping_once(torch: SimpleNamespace) -> None:
    graph_class = torch._C._CUDAGraph
    begin, end = graph_class.capture_begin, graph_class.capture_end
    watch_captures(torch)
    assert (graph_class.capture_begin, graph_class.capture_end) == (begin, end)
    assert begin.__doc__ == "The documentation of the begin."


def test_a_torch_without_graphs_is_left_alone() -> None:
    for extension in (SimpleNamespace(), SimpleNamespace(_CUDAGraph=object)):
        watch_captures(SimpleNamespace(_C=extension))
        assert not hasattr(getattr(extension, "_CUDAGraph", None), "capture_begin")


def test_a_capture_passes_the_gate_until_it_is_visible(torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        seen.append(("in", visible()))
        yield
        seen.append(("out", visible()))

    monkeypatch.setattr(capture_gate, "held", held)
    graph = torch._C._CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    assert seen == [("in", 0), ("out", 1)]


def test_with_the_preload_library_a_capture_passes_the_gate_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    class Graph:
        def capture_begin(self, pool: object = None) -> object:
            inside.append(capture_gate._lock._is_owned())  # type: ignore[attr-defined]
            return pool

        def capture_end(self) -> None: ...

    end = Graph.capture_end
    monkeypatch.setattr(_core, "preloaded", True)
    module: Any = SimpleNamespace(_C=SimpleNamespace(_CUDAGraph=Graph, _cuda_getDevice=lambda: 0))
    watch_captures(module)
    watch_captures(module)
    assert (Graph().capture_begin(pool=3), inside, visible()) == (3, [True], 0)
    assert Graph.capture_end is end


def test_a_failed_begin_is_undone(torch: SimpleNamespace) -> None:
    torch.fails = True
    graph = torch._C._CUDAGraph()
    with pytest.raises(Failure):
        graph.capture_begin()
    assert visible() == 0
    with pytest.raises(Failure):
        graph.capture_end()  # Of nothing.
    assert visible() == 0


def test_a_failed_end_ends_captures_that_cannot_be_queried(torch: SimpleNamespace) -> None:
    graph = torch._C._CUDAGraph()
    graph.capture_begin()
    torch.fails = True
    with pytest.raises(Failure):
        graph.capture_end()
    assert visible() == 0


def test_ends_match_their_own_graphs(torch: SimpleNamespace) -> None:
    graphs = [torch._C._CUDAGraph() for _ in range(3)]
    for number, graph in enumerate(graphs):
        torch.stream = STREAM + 16 * number
        graph.capture_begin()
    assert visible() == 3
    graphs[0].capture_end()
    graphs[0].capture_end()  # A second call ends no other's.
    assert visible() == 2
    graphs[2].capture_end()
    graphs[1].capture_end()
    assert visible() == 0


def test_the_next_capture_of_a_stream_replaces_one_that_was_left(torch: SimpleNamespace) -> None:
    left, graph = torch._C._CUDAGraph(), torch._C._CUDAGraph()
    left.capture_begin()
    del left
    gc.collect()
    assert visible() == 1
    graph.capture_begin()
    assert visible() == 1
    graph.capture_end()
    assert visible() == 0


def test_the_stream_may_be_queried_once_the_capture_has_begun(
    torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(_core, "capture_begun", begun.append)
    graph, failing = torch._C._CUDAGraph(), torch._C._CUDAGraph()
    identity = _core.capture_begin_on(STREAM)
    assert _core.capture_end(identity)
    assert graph.capture_begin() == "begun"
    assert begun == [identity + 1]
    torch.stream += 16
    torch.fails = True
    with pytest.raises(Failure):
        failing.capture_begin()
    assert begun == [identity + 1]
    torch.fails = False
    graph.capture_end()


def test_more_captures_than_there_is_room_for_go_on_unseen(torch: SimpleNamespace) -> None:
    most = 16
    graphs = [torch._C._CUDAGraph() for _ in range(most + 1)]
    for number, graph in enumerate(graphs):
        torch.stream = STREAM + 16 * number
        assert graph.capture_begin() == "begun"
    assert visible() == most
    for graph in reversed(graphs):
        graph.capture_end()
    assert visible() == 0


def test_a_capture_inside_a_pause_of_its_own_thread_is_an_error(torch: SimpleNamespace) -> None:
    graph, caught = torch._C._CUDAGraph(), []
    with core_region("a", _core.BACKUP_PINNED, True):
        address = _core.allocate(1 << 20, 0)

    def find_live() -> None:
        with pytest.raises(InvalidStateError, match="inside pause"):
            graph.capture_begin()
        caught.append(visible())

    assert _core.pause(None, None, False, None, find_live).allocations == 1
    assert caught == [0]
    assert torch.seen == []
    _core.free(address)
