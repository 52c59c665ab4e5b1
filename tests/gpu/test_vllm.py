"""Guards vLLM's sleep mode through the plug-in, with a stand-in for vLLM: levels, tags, stages, discards, the graph pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from gpu_support import (
    MIB,
    SIMULATED,
    assert_same,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    saver,
    take_all_but,
    torch,
)
from other_threads import in_thread
from vllm_engine import load_plugin, make_worker, stand_in

WEIGHTS, CACHE, STATE = 24 * MIB, 32 * MIB, 12 * MIB
#: Device memory of the kernel that computes fingerprints, which the first sleep of a process loads.
FINGERPRINTS = 2 * MIB


class Engine:
    """A worker with its memory."""

    def __init__(self, **settings: Any) -> None:
        self.worker = make_worker(**settings)
        self.weights = self.worker.load_model(lambda: empty(WEIGHTS))
        self.state, self.cache = self.worker.initialize_cache(lambda: empty(STATE), lambda: empty(CACHE))
        for seed, tensor in enumerate(self.tensors):
            fill_random(tensor, seed)
        self.expected = [tensor.cpu() for tensor in self.tensors]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.weights, self.state, self.cache]

    def paused(self) -> list[bool]:
        """Whether the weights, the state and the cache are paused."""
        return [saver.is_paused(tensor) for tensor in self.tensors]

    def check(self, *kept: bool) -> None:
        """The weights, the state and the cache are at their addresses, and those that were kept have their contents. Dropped
        contents are known to differ on the simulated GPU only."""
        assert [tensor.data_ptr() for tensor in self.tensors] == self.addresses
        same = [torch.equal(tensor.cpu(), expected) for tensor, expected in zip(self.tensors, self.expected, strict=True)]
        if SIMULATED:
            assert same == list(kept)
        assert all(is_same for is_same, was_kept in zip(same, kept, strict=True) if was_kept)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[Any]:
    with stand_in():
        loaded = load_plugin()
        yield loaded
        loaded.allocator.release_pools()


def scribble() -> None:
    """Writes to the memory that a sleeping engine has given back."""
    other = empty(WEIGHTS + CACHE)
    other.fill_(0xEE)
    del other
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("level", "kept"), [(1, [True, True, False]), (2, [False, True, False])])
def test_a_level_keeps_what_it_says_and_releases_everything(level: int, kept: list[bool], plugin: Any) -> None:
    engine = Engine()
    assert [saver.tag_of(tensor) for tensor in engine.tensors] == ["weights", "runtime", "kv_cache"]
    used = plugin.allocator.get_current_usage()
    before = free_bytes()
    engine.worker.sleep(level)
    assert engine.worker.sleep_mode_backend.state() == "SUSPENDED"
    assert engine.paused() == [True, True, True]
    assert free_bytes() - before >= WEIGHTS + CACHE + STATE - FINGERPRINTS
    stats = saver.stats()
    assert [bool(stats.tags[tag].backup_bytes) for tag in ("weights", "runtime", "kv_cache")] == kept
    assert plugin.allocator.get_current_usage() == used == WEIGHTS + CACHE + STATE
    scribble()
    engine.worker.wake_up()
    assert engine.worker.sleep_mode_backend.state() == "RUNNING"
    assert engine.paused() == [False, False, False]
    engine.check(*kept)


def copied_by(call: Callable[[], object]) -> int:
    """The bytes that the pauses of a call copy."""
    before = saver.stats().pauses.copied_bytes
    call()
    return saver.stats().pauses.copied_bytes - before


def test_a_later_sleep_copies_only_what_has_changed() -> None:
    engine = Engine()
    assert copied_by(lambda: engine.worker.sleep(1)) == WEIGHTS + STATE
    scribble()
    engine.worker.wake_up()
    assert copied_by(lambda: engine.worker.sleep(1)) == 0
    scribble()
    engine.worker.wake_up()
    engine.check(True, True, False)

    engine.weights[-1] += 1
    engine.expected[0][-1] += 1
    assert 0 < copied_by(lambda: engine.worker.sleep(1)) <= 1 * MIB
    scribble()
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_a_sleep_that_drops_the_weights_releases_their_host_copy() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert saver.stats().tags["weights"].backup_bytes == WEIGHTS
    engine.worker.sleep(2)
    assert saver.stats().tags["weights"].backup_bytes == 0
    engine.worker.wake_up()


@pytest.mark.parametrize(("value", "released"), [("1", True), ("0", False)])
def test_vllms_variable_releases_the_host_copy(value: str, released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY", value)
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert saver.stats().total.backup_bytes == (0 if released else WEIGHTS + STATE)
    engine.check(True, True, False)


def test_a_sleep_and_its_end_start_no_collection() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        engine.worker.sleep(1)
        engine.worker.wake_up()
    finally:
        gc.callbacks.remove(note)
    assert max(generations, default=0) < 2, "a collection of all objects"
    engine.check(True, True, False)


def test_the_worker_restores_the_buffers_of_level_two() -> None:
    engine = Engine()
    buffer = engine.weights[: 1 * MIB]
    engine.worker.buffers["scale"] = buffer
    engine.worker.sleep(2)
    scribble()
    engine.worker.wake_up(["weights"])
    assert_same(buffer.cpu(), engine.expected[0][: 1 * MIB])
    engine.worker.wake_up()


def test_preserved_tensors_survive_level_two() -> None:
    engine = Engine()
    with engine.worker.memory_pool("weights.more"):
        table = empty(2 * MIB)
    fill_random(table, 7)
    expected = table.cpu()
    handle = saver.preserve(table)
    engine.worker.sleep(2)
    scribble()
    engine.worker.wake_up()
    assert_same(table.cpu(), expected)
    handle.remove()


def test_waking_in_stages() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up(["weights"])
    assert engine.paused() == [False, False, True], "state that vLLM cannot name wakes up in any case"
    assert engine.worker.sleep_mode_backend.state() == "SUSPENDED"
    assert_same(engine.weights.cpu(), engine.expected[0])
    engine.worker.wake_up(["kv_cache"])
    assert engine.paused() == [False, False, False]
    assert engine.worker.sleep_mode_backend.state() == "RUNNING"
    engine.check(True, True, False)


def test_the_cache_may_wake_up_first() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up(["kv_cache"])
    assert engine.paused() == [True, False, False]
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_unknown_tags_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.worker.discard(("nothing",))
    assert engine.paused() == [False, False, False]
    engine.worker.sleep(1)
    engine.worker.wake_up(["nothing"])
    assert engine.paused() == [True, False, True]
    engine.worker.wake_up()
    assert not caplog.records


def test_a_discard_drops_only_its_tags() -> None:
    engine = Engine()
    before = free_bytes()
    engine.worker.discard(("kv_cache",))
    assert engine.paused() == [False, False, True]
    assert engine.worker.sleep_mode_backend.state() == "SUSPENDED"
    assert free_bytes() - before >= CACHE
    assert saver.stats().total.backup_bytes == 0
    scribble()
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_sleeping_twice_keeps_what_the_first_sleep_kept() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    copied = saver.stats().pauses.copied_bytes
    engine.worker.sleep(1)
    engine.worker.sleep(2)
    engine.worker.discard(("weights", "kv_cache"))
    assert saver.stats().pauses.copied_bytes == copied
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_a_sleep_after_a_partial_wake_up_keeps_the_weights() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    engine.worker.wake_up(["kv_cache"])
    engine.worker.sleep(2)
    assert engine.paused() == [True, True, True]
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_waking_an_engine_that_is_awake() -> None:
    engine = Engine()
    engine.worker.wake_up()
    engine.worker.wake_up(["weights"])
    assert engine.worker.sleep_mode_backend.state() == "RUNNING"
    engine.check(True, True, True)


def test_a_wake_up_without_memory_can_be_made_again() -> None:
    engine = Engine()
    engine.worker.sleep(1)
    other = take_all_but(CACHE)
    with pytest.raises(errors.OutOfMemoryError):
        engine.worker.wake_up()
    assert engine.paused() == [True, True, True]
    assert engine.worker.sleep_mode_backend.state() == "SUSPENDED"
    del other
    torch.cuda.empty_cache()
    engine.worker.wake_up()
    engine.check(True, True, False)


def test_other_memory_of_the_process_stays_awake(plugin: Any) -> None:
    with saver.region("trainer"):
        trainer = empty(2 * MIB)
    engine = Engine()
    assert plugin.allocator.get_current_usage() == WEIGHTS + CACHE + STATE
    engine.worker.sleep(2)
    assert not saver.is_paused(trainer)
    saver.pause("trainer", backup="discard")
    engine.worker.wake_up()
    assert saver.is_paused(trainer)
    saver.resume("trainer")


def test_the_pool_without_a_tag(plugin: Any) -> None:
    with plugin.allocator.use_memory_pool():
        tensor = empty(2 * MIB)
    fill_random(tensor, 1)
    expected = tensor.cpu()
    plugin.allocator.sleep()
    scribble()
    plugin.allocator.wake_up()
    assert_same(tensor.cpu(), expected)
    plugin.allocator.sleep(offload_tags="weights")
    assert saver.stats().total.backup_bytes == 0
    plugin.allocator.wake_up()


def test_a_second_engine_of_the_process(plugin: Any) -> None:
    engine = Engine()
    with pytest.raises(AssertionError, match="another engine"):
        engine.worker.load_model(lambda: None)
    del engine
    assert plugin.allocator.get_current_usage() == 0
    second = Engine()
    second.worker.sleep(1)
    second.worker.wake_up()
    second.check(True, True, False)


def test_vllms_own_backend_allocates_nothing_here() -> None:
    engine = Engine(backend="cumem")
    assert [saver.tag_of(tensor) for tensor in engine.tensors] == [None, None, None]


class Graph:
    """A captured step: `constant` is written once, and never by a replay."""

    def __init__(self, engine: Engine) -> None:
        capture_pool = import_module("vllm.compilation.cudagraph_pool").capture_pool
        token = torch.cuda.graph_pool_handle()
        self.input = torch.arange(WEIGHTS // 8, dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with capture_pool(token, engine.worker.vllm_config) as self.pool:
            self.is_own = self.pool != token
            with torch.cuda.graph(self.graph, pool=self.pool, stream=torch.cuda.Stream()):
                self.constant = torch.empty_like(self.input)
                self.output = self.input * 2 + self.constant
        self.constant.fill_(5)

    def check(self) -> None:
        self.graph.replay()
        torch.cuda.synchronize()
        assert_same(self.output, torch.arange(WEIGHTS // 8, dtype=torch.int64, device="cuda") * 2 + 5)


@pytest.mark.parametrize("level", [1, 2])
def test_the_graph_pool_sleeps_and_wakes_up_with_anything(level: int) -> None:
    engine = Engine(sleep_mode_offload_cudagraph=True)
    graph, other = Graph(engine), Graph(engine)
    assert graph.is_own
    assert graph.pool == other.pool == graph.graph.pool()
    assert [saver.tag_of(tensor) for tensor in (graph.constant, other.output)] == ["cudagraph"] * 2
    assert saver.tag_of(graph.input) is None
    graph.check()
    engine.worker.sleep(level)
    assert saver.is_paused(graph.constant)
    assert saver.is_paused(other.output)
    scribble()
    engine.worker.wake_up(["kv_cache"])
    assert saver.is_paused(engine.weights)
    other.check()
    graph.check()
    engine.worker.wake_up()


def test_the_graph_pool_is_released_and_used_again(plugin: Any) -> None:
    engine = Engine(sleep_mode_offload_cudagraph=True)
    graph = Graph(engine)
    rest = WEIGHTS + CACHE + STATE
    assert plugin.allocator.get_current_usage() > rest, "a graph that lives keeps its pool"
    graph.check()
    assert Graph(engine).pool == graph.pool
    del graph
    plugin.allocator.release_pools()
    assert "cudagraph" not in {row.tag for row in core.segments()}
    assert plugin.allocator.get_current_usage() == rest
    graph = Graph(engine)
    assert saver.tag_of(graph.output) == "cudagraph"
    engine.worker.sleep(2)
    scribble()
    engine.worker.wake_up()
    graph.check()


def test_the_graph_pool_is_released_while_another_thread_is_in_a_region(plugin: Any) -> None:
    """PyTorch before 2.13 ends the process if a MemPool is destroyed while another one is routed."""
    engine = Engine(sleep_mode_offload_cudagraph=True)
    Graph(engine).check()

    with saver.region("elsewhere"):
        in_thread(plugin.allocator.release_pools)
    plugin.allocator.release_pools()
    assert "cudagraph" not in {row.tag for row in core.segments()}


def test_graphs_stay_ordinary_unless_their_release_is_requested() -> None:
    engine = Engine()
    graph = Graph(engine)
    assert not graph.is_own
    assert saver.tag_of(graph.output) is None
    engine.worker.sleep(1)
    graph.check()
    engine.worker.wake_up()
