"""Guards cuda_graph(): a capture's memory is managed, and all is restored at its end, also when it fails. Captures with one
token share a pool, which is the token's own where that can be managed, and lives as long as their graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeGraph, FakeTorch

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_a_capture_has_a_managed_pool(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    graph = FakeGraph()
    with saver.cuda_graph(cuda_graph=graph, tag="graphs", enable_cpu_backup=True):
        assert _core.counters()["visible_captures"] == 1
        address = fake_torch.allocate(2 * MIB)
    assert _core.counters()["visible_captures"] == 0
    (row,) = saver.stats().allocations
    assert (row.address, row.tag, row.backup) == (address, "graphs", "host")
    assert saver.pause("graphs").bytes == 2 * MIB


def test_a_capture_is_one_from_its_begin_on(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch synchronizes and empties caches before it, pauses are not refused and frees not deferred."""
    with saver.region("other"):
        fake_torch.allocate(2 * MIB)
    paused: list[int] = []
    monkeypatch.setattr(fake_torch, "before_capture_begin", lambda: paused.append(saver.pause().allocations))
    with saver.cuda_graph(FakeGraph(), tag="graphs"):
        assert _core.counters()["visible_captures"] == 1
    assert paused == [1]
    saver.resume()


def test_a_pool_that_is_paused_before_the_begin_is_not_captured_into(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, kept = (5, 5), FakeGraph()
    with saver.cuda_graph(kept, pool=token, tag="graphs"):
        fake_torch.allocate(2 * MIB)
    monkeypatch.setattr(fake_torch, "before_capture_begin", saver.pause)
    with (
        pytest.raises(errors.InvalidStateError, match="resume tag 'graphs' before capturing"),
        saver.cuda_graph(FakeGraph(), pool=token, tag="graphs"),
    ):
        pass
    assert _core.counters()["visible_captures"] == 0
    assert fake_torch.routings == [] and fake_torch.capturing == []
    saver.resume()
    monkeypatch.setattr(fake_torch, "before_capture_begin", lambda: None)
    with saver.cuda_graph(FakeGraph(), pool=token, tag="graphs"):
        pass


def test_workspaces_are_made_before_the_capture_and_in_ordinary_memory(
    saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    with saver.region("weights"), saver.cuda_graph(FakeGraph(), tag="graphs"):
        assert fake_torch.workspaces == [([], 0)] * 2, "before torch synchronizes, and again when the capture begins"


def test_captures_without_a_token_share_nothing(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    graphs = [FakeGraph(), FakeGraph()]
    for graph in graphs:
        with saver.cuda_graph(graph):
            pass
    assert graphs[0].pool_id != graphs[1].pool_id


def test_a_capture_inside_a_region(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("outer"):
        before = fake_torch.allocate(2 * MIB)
        with saver.cuda_graph(FakeGraph(), tag="g"):
            captured = fake_torch.allocate(2 * MIB)
        after = fake_torch.allocate(2 * MIB)
    assert {row.address: row.tag for row in saver.stats().allocations} == {before: "outer", captured: "g", after: "outer"}


def test_a_capture_begins_with_an_empty_cache(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("outer"):
        kept, idle = fake_torch.allocate(2 * MIB), fake_torch.allocate(4 * MIB)
        fake_torch.free(idle)
        with saver.cuda_graph(FakeGraph(), tag="g"):
            assert [row.address for row in saver.stats().allocations] == [kept]


def test_memory_of_a_failed_capture_is_released(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    capture = fake_torch.graph
    fake_torch.torch.cuda.graph = lambda *arguments, **keywords: InvalidatedCapture(capture(*arguments, **keywords))
    graph = FakeGraph()
    with pytest.raises(RuntimeError, match="was invalidated"), saver.cuda_graph(graph, tag="g"):
        fake_torch.free(fake_torch.allocate(2 * MIB))
    assert saver.stats().total.allocations == 1, "the graph may still name its pool"
    del graph
    gc.collect()
    saver.empty_cache()
    assert saver.stats().total.allocations == 0


class InvalidatedCapture(contextlib.ExitStack):
    """A capture whose end fails."""

    capture_stream = SimpleNamespace(device_index=0)

    def __init__(self, capture: contextlib.AbstractContextManager[None]) -> None:
        super().__init__()
        self.capture = capture

    def __enter__(self) -> InvalidatedCapture:
        self.callback(self.fail)
        self.enter_context(self.capture)
        return self

    def fail(self) -> None:
        raise RuntimeError("the capture was invalidated")


def test_allocations_of_torch_before_the_capture_are_not_managed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    seeds: list[int] = []
    capture = fake_torch.graph

    def with_seeds(*arguments: object, **keywords: object) -> object:
        seeds.append(fake_torch.allocate(512))
        return capture(*arguments, **keywords)  # type: ignore[arg-type]

    fake_torch.torch.cuda.graph = with_seeds
    with saver.region("outer"), saver.cuda_graph(FakeGraph(), tag="g"):
        current = _core.region_current()
        assert (current.tag, current.backup, current.managed) == ("g", _core.BACKUP_NONE, False)
    assert fake_torch.pool_of(seeds[0]) == DEFAULT


@pytest.mark.parametrize("region", [False, True])
def test_an_exception_inside_restores_everything(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, region: bool
) -> None:
    def capture() -> None:
        with pytest.raises(ZeroDivisionError), saver.cuda_graph(FakeGraph(), tag="g"):
            raise ZeroDivisionError

    if region:
        with saver.region("outer"):
            capture()
            assert _core.region_current().tag == "outer"
            assert len(fake_torch.routings) == 1
    else:
        capture()
    assert _core.region_current().depth == 0
    assert _core.counters()["visible_captures"] == 0
    assert store.stack() == []


def test_a_failed_begin_restores_everything(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("outer"):
        manager = saver.cuda_graph(FakeGraph(), stream=None)
        fake_torch.torch.cuda.graph = lambda *a, **k: FailingCapture(fake_torch)
        with pytest.raises(RuntimeError, match="cannot capture"):
            manager.__enter__()
        assert fake_torch.stream == "main stream"
        assert _core.region_current().tag == "outer"
        assert len(fake_torch.routings) == 1
    assert _core.counters()["visible_captures"] == 0


class FailingCapture:
    capture_stream = SimpleNamespace(device_index=0)

    def __init__(self, fake_torch: FakeTorch) -> None:
        self.fake_torch = fake_torch

    def __enter__(self) -> None:
        self.fake_torch.stream = "capture stream"
        raise RuntimeError("cannot capture")

    def __exit__(self, *exception: object) -> None:
        pytest.fail("it has not begun")


@pytest.mark.parametrize(
    "arguments",
    [
        {"cuda_graph": "graph"},
        {"pool": "token"},
        {"pool": (1, 2, 3)},
        {"capture_error_mode": "strict"},
        {"tag": ""},
        {"cpu_backup_backend": "mmap"},
        {"enable_cpu_backup": True, "cpu_backup_backend": "tape"},
    ],
)
def test_bad_arguments(saver: TorchMemorySaver, fake_torch: FakeTorch, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.cuda_graph(**({"cuda_graph": FakeGraph()} | arguments))


def with_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module = ModuleType("torch")
    module.distributed = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: backend, get_rank=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.parametrize(
    ("backend", "setting", "warnings"), [("nccl", None, 1), ("nccl", "0", 0), ("gloo", None, 0), ("nccl", "1", 1)]
)
def test_one_warning_about_nccl(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    setting: str | None,
    warnings: int,
) -> None:
    with_backend(monkeypatch, backend)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", setting)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        for _ in range(2):
            with saver.cuda_graph(FakeGraph()):
                pass
    assert len([record for record in caplog.records if "NCCL_GRAPH_REGISTER" in record.message]) == warnings


TOKEN = (7, 0)


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cudaMalloc is ours: its allocations are managed if a region's settings are in force."""
    monkeypatch.setattr(_core, "preloaded", True)


def capture(saver: TorchMemorySaver, fake_torch: FakeTorch, **keywords: Any) -> tuple[FakeGraph, int]:
    """A graph, and the address of the allocation during its capture."""
    graph = FakeGraph()
    with saver.cuda_graph(graph, **keywords):
        address = fake_torch.allocate(2 * MIB)
    return graph, address


# ---- shared pools ----


def test_captures_with_one_token_share_a_pool(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    graphs = [FakeGraph() for _ in range(5)]
    for graph in graphs[:2]:
        with saver.cuda_graph(graph, pool=TOKEN):
            fake_torch.free(fake_torch.allocate(2 * MIB))
    with saver.cuda_graph(graphs[2], pool=graphs[0].pool()):
        fake_torch.allocate(2 * MIB)
    assert graphs[0].pool_id == graphs[1].pool_id == graphs[2].pool_id != TOKEN
    assert saver.stats().total.allocations == 1, "they use each other's idle memory"
    with saver.cuda_graph(graphs[3], pool=TOKEN, tag="other"):
        pass
    with saver.cuda_graph(graphs[4], pool=TOKEN, enable_cpu_backup=True):
        pass
    assert len({graph.pool_id for graph in graphs}) == 3


def test_the_pool_is_released_with_its_last_graph(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    graphs = [FakeGraph(), FakeGraph()]
    for graph in graphs:
        with saver.cuda_graph(graph, pool=TOKEN):
            fake_torch.free(fake_torch.allocate(2 * MIB))
    pool = graphs[0].pool_id
    del graph
    graphs.pop()
    gc.collect()
    saver.empty_cache()
    assert pool in fake_torch.alive
    assert saver.stats().total.allocations == 1, "a replay uses memory that torch believes to be idle"
    graphs.pop()
    gc.collect()
    saver.empty_cache()
    assert pool not in fake_torch.alive
    assert saver.stats().total.allocations == 0
    again = FakeGraph()
    with saver.cuda_graph(again, pool=TOKEN):
        pass
    assert again.pool_id != pool


def test_a_token_with_unmanaged_memory_is_an_error(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    theirs = fake_torch.make_pool(0, managed=False)
    with fake_torch.capture(FakeGraph(), theirs.id, None, "global"):
        fake_torch.allocate(2 * MIB)
    with pytest.raises(errors.InvalidStateError, match="not managed"), saver.cuda_graph(FakeGraph(), pool=theirs.id):
        pytest.fail("nothing may be captured")


def test_a_paused_pool_is_an_error_until_it_is_resumed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    graph = FakeGraph()
    with saver.cuda_graph(graph, pool=TOKEN, tag="g"):
        fake_torch.allocate(2 * MIB)
    saver.pause("g")
    with pytest.raises(errors.InvalidStateError, match="resume"), saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"):
        pytest.fail("nothing may be captured")
    other, _ = capture(saver, fake_torch, tag="g")
    saver.resume("g")
    again = FakeGraph()
    with saver.cuda_graph(again, pool=TOKEN, tag="g"):
        pass
    assert again.pool_id == graph.pool_id != other.pool_id


# ---- the token's own pool ----


@pytest.mark.parametrize("region", [False, True])
def test_a_token_s_own_pool_is_used_in_a_preloaded_process(
    saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None, region: bool
) -> None:
    with saver.region("outer") if region else contextlib.nullcontext():
        graph, address = capture(saver, fake_torch, pool=TOKEN, tag="g", enable_cpu_backup=True)
        assert (_core.region_current().tag, len(fake_torch.routings)) == (("outer", 1) if region else ("default", 0))
    assert graph.pool() == TOKEN
    (row,) = saver.stats().allocations
    assert (row.address, row.tag, row.backup) == (address, "g", "host")
    fake_torch.free(address)
    again, other = capture(saver, fake_torch, pool=graph.pool(), tag="g", enable_cpu_backup=True)
    assert (again.pool(), other) == (TOKEN, address)
    fake_torch.free(address)
    saver.empty_cache()
    assert saver.stats().total.allocations == 1
    del graph, again
    gc.collect()
    saver.empty_cache()
    assert saver.stats().total.allocations == 0
    assert _core.region_current().depth == 0


def test_expandable_segments_do_not_come_from_cuda_malloc(
    saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None
) -> None:
    fake_torch.expandable_segments = True
    graph, address = capture(saver, fake_torch, pool=TOKEN, tag="g")
    assert graph.pool() != TOKEN
    assert [row.address for row in saver.stats().allocations] == [address]
    ours = fake_torch.make_pool(0, managed=True).id
    assert capture(saver, fake_torch, pool=ours, tag="g")[0].pool() == ours
    plain = FakeGraph()
    with fake_torch.capture(plain, (8, 0), None, "global"):
        fake_torch.allocate(2 * MIB)
    with pytest.raises(errors.InvalidStateError, match="expandable_segments"):
        capture(saver, fake_torch, pool=(8, 0), tag="g")


def test_settings_of_a_capture_end_before_it_does(saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None) -> None:
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def noting(*arguments: Any, **keywords: Any) -> Iterator[None]:
        seen.append((_core.region_current().tag, _core.region_current().managed))
        yield
        seen.append((_core.region_current().tag, _core.region_current().managed))

    def graph(*arguments: Any, **keywords: Any) -> Any:
        context: Any = noting(*arguments, **keywords)
        context.capture_stream = SimpleNamespace(device_index=0)
        return context

    fake_torch.torch.cuda.graph = graph
    with saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"):
        current = _core.region_current()
        assert (current.tag, current.backup, current.managed) == ("g", _core.BACKUP_NONE, True)
    assert seen == [("g", False), ("g", False)], "what torch itself allocates for all graphs is not managed"


def test_another_tag_gets_a_pool_of_its_own(saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None) -> None:
    graph, address = capture(saver, fake_torch, pool=TOKEN, tag="g")
    fake_torch.free(address)
    other, _ = capture(saver, fake_torch, pool=TOKEN, tag="other")
    kept, _ = capture(saver, fake_torch, pool=TOKEN, tag="g", enable_cpu_backup=True)
    assert len({graph.pool(), other.pool(), kept.pool()}) == 3
    assert saver.pause("g").allocations == 2
    assert [row.tag for row in saver.stats().allocations if row.state == "active"] == ["other"]


@pytest.mark.parametrize("is_preloaded", [True, False])
def test_a_token_s_paused_pool_is_an_error(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, is_preloaded: bool
) -> None:
    monkeypatch.setattr(_core, "preloaded", is_preloaded)
    token = TOKEN if is_preloaded else fake_torch.make_pool(0, managed=True).id
    graph, _ = capture(saver, fake_torch, pool=token, tag="g")
    assert graph.pool() == token
    saver.pause("g")
    with pytest.raises(errors.InvalidStateError, match="resume tag 'g'"):
        capture(saver, fake_torch, pool=token, tag="g")
    assert _core.counters()["visible_captures"] == 0
    saver.resume("g")
    again, _ = capture(saver, fake_torch, pool=token, tag="g")
    assert again.pool() == token


def test_a_token_with_ordinary_memory_is_reported_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    plain = FakeGraph()
    with fake_torch.capture(plain, TOKEN, None, "global"):
        fake_torch.allocate(6 * MIB)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        graphs = [capture(saver, fake_torch, pool=TOKEN, tag="g")[0] for _ in range(2)]
    assert [graph.pool() for graph in graphs] == [TOKEN, TOKEN]
    assert saver.stats().total.allocations == 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{6 * MIB} bytes of graph pool {TOKEN} are ordinary memory")


def test_a_default_pool_with_managed_memory_is_reported_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, preloaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        for _ in range(2):
            with saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"):
                fake_torch.end_routing(0, TOKEN)
                outside = fake_torch.allocate(4 * MIB)
                fake_torch.begin_routing(0, TOKEN)
                fake_torch.release_pool(0, TOKEN)
    fake_torch.split(outside, (MIB, "active_allocated"), (3 * MIB, "inactive"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"default pool got {4 * MIB} bytes" in message
    assert saver.pause("g").reusable_bytes == (3 * MIB if fake_torch.captures_join_regions else 0)
    saver.resume("g")


def test_ending_routing_to_a_token_that_was_replaced_is_explained(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with (
        pytest.raises(errors.InvalidStateError, match=r'hook mode "preload".*MemPool') as caught,
        saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"),
    ):
        fake_torch.end_routing(0, TOKEN)
    assert "not currently recording" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="already recording"), saver.cuda_graph(FakeGraph(), pool=TOKEN, tag="g"):
        fake_torch.begin_routing(0, fake_torch.routings[-1][1])
    with pytest.raises(RuntimeError, match="not currently recording") as plain, saver.cuda_graph(FakeGraph(), tag="g"):
        fake_torch.end_routing(0, TOKEN)
    assert plain.type is RuntimeError
