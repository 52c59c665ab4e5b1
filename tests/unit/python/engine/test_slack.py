"""Guards slack: its statistics, who gets it, what returns it, and region(runs=False), which has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch
from processes import Program
from recorded_hooks import RUN_OF_FOUR, SIZE, Recorder

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver


def fill(simulator: Any, addresses: list[int]) -> None:
    for number, address in enumerate(addresses):
        simulator.write(address, bytes([number + 1]) * SIZE)


def assert_filled(simulator: Any, addresses: list[int]) -> None:
    for number, address in enumerate(addresses):
        assert simulator.read(address, SIZE) == bytes([number + 1]) * SIZE


@pytest.fixture(params=[_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_DISK], ids=["discard", "pinned", "disk"])
def slack(request: pytest.FixtureRequest, hooks: Recorder, simulator: Any) -> list[int]:
    """Three allocations of the tag "w" that share a run with slack of one more, filled."""
    addresses = hooks.make_slack("w", backup=request.param)
    fill(simulator, addresses)
    return addresses


def slack_of(hooks: Recorder, name: str, device: int | None = None) -> int:
    return hooks.saver.stats(hooks.tag(name), device).total.slack_bytes


# -- what returns it -----------------------------------------------------------------------------------------------------


def test_a_pause_with_a_backup_and_a_resume_return_slack_and_keep_contents(
    hooks: Recorder, simulator: Any, slack: list[int]
) -> None:
    """Also where the region discards the contents."""
    before = simulator.usage().physical_bytes
    stats = hooks.saver.stats()
    usage = stats.tags[hooks.tag("w")]
    assert (usage.slack_bytes, usage.resident_bytes) == (SIZE, (RUN_OF_FOUR - 1) * SIZE)
    assert stats.devices[0].slack_bytes == stats.total.slack_bytes == stats.slack_bytes == SIZE
    report = hooks.saver.pause(hooks.tag("w"), backup="host")
    assert report.copied_bytes == (RUN_OF_FOUR - 1) * SIZE
    assert hooks.saver.stats().slack_bytes == simulator.usage().physical_bytes == 0
    hooks.saver.resume(hooks.tag("w"))
    assert before - simulator.usage().physical_bytes == SIZE
    assert_filled(simulator, slack)
    stats = hooks.saver.stats()
    usage = stats.tags[hooks.tag("w")]
    assert (usage.slack_bytes, usage.resident_bytes, usage.paused_bytes) == (0, (RUN_OF_FOUR - 1) * SIZE, 0)
    assert stats.slack_bytes == stats.counters["slack_bytes"] == 0


def test_slack_is_counted_by_tag_and_device(hooks: Recorder) -> None:
    hooks.make_slack("a/w")
    hooks.make_slack("b/w", device=1)
    assert (slack_of(hooks, "a/w"), slack_of(hooks, "b/w")) == (SIZE, SIZE)
    assert (slack_of(hooks, "a/w", 1), slack_of(hooks, "b/w", 1)) == (0, SIZE)
    hooks.saver.pause(hooks.tag("a/w"))
    assert (slack_of(hooks, "a/w"), slack_of(hooks, "b/w")) == (0, SIZE)


def test_what_torch_only_caches_is_returned_as_well(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, simulator: Any
) -> None:
    """Its segments lie in a run, so their release alone returns nothing."""
    with saver.region("a"):
        addresses = [fake_torch.allocate(SIZE) for _ in range(RUN_OF_FOUR)]
    saver.pause()
    saver.resume()
    fake_torch.free(addresses.pop(-2))
    fill(simulator, addresses)
    saver.pause("a", backup="host")
    saver.resume("a")
    assert_filled(simulator, addresses)
    assert simulator.usage().physical_bytes == (RUN_OF_FOUR - 1) * SIZE


# -- who gets it, and who has none ------------------------------------------------------------------------------------------


def test_the_next_allocation_of_the_kind_gets_the_slack(hooks: Recorder, simulator: Any) -> None:
    hooks.make_slack("w")
    before = simulator.usage().physical_bytes
    simulator.clear_counts()
    hooks.allocate("w")
    assert simulator.calls("cuMemCreate") == simulator.calls("cuMemMap") == 0
    assert simulator.usage().physical_bytes == before
    usage = hooks.saver.stats().tags[hooks.tag("w")]
    assert (usage.slack_bytes, usage.resident_bytes) == (0, RUN_OF_FOUR * SIZE)


def test_a_region_without_runs_has_no_slack(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, simulator: Any
) -> None:
    with saver.region("a", runs=False):
        addresses = [fake_torch.allocate(SIZE) for _ in range(RUN_OF_FOUR)]
    saver.pause()
    saver.resume()
    assert simulator.usage().handles == RUN_OF_FOUR
    fake_torch.free(addresses[-2])
    saver.empty_cache()
    assert simulator.usage().physical_bytes == (RUN_OF_FOUR - 1) * SIZE
    assert saver.stats().slack_bytes == 0


@pytest.mark.parametrize(("value", "slack"), [("0", 0), ("1", SIZE)])
def test_a_process_without_runs_has_no_slack(program: Program, value: str, slack: int) -> None:
    text = f"""
from torch_memory_saver import _core
level = _core.region_enter("w", _core.BACKUP_NONE, True)
addresses = [_core.allocate({SIZE}, 0) for _ in range({RUN_OF_FOUR})]
_core.pause(None, None)
_core.resume(None, None)
_core.free(addresses[-2])
counters = _core.counters()
assert (counters["slack_bytes"], counters["resident_bytes"]) == ({slack}, {(RUN_OF_FOUR - 1) * SIZE}), counters
"""
    program(text, preloaded=False, TMS_RUNS=value)


@pytest.fixture
def parameters_of_graphs(fake_torch: FakeTorch) -> Iterator[list[Any]]:
    """The settings that captures announce."""
    announced: list[Any] = []
    begin = _core.capture_begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "capture_begin", lambda *settings: announced.append(settings) or begin(*settings))  # type: ignore[func-returns-value]
        yield announced


def test_settings_of_a_graph_and_of_nested_regions(
    saver: TorchMemorySaver, fake_torch: FakeTorch, parameters_of_graphs: list[Any]
) -> None:
    graph = fake_torch.torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph", runs=False):
        pass
    assert [runs for _, _, _, runs in parameters_of_graphs] == [False]
    decorated = saver.region("c", runs=False)(_core.region_current)
    with saver.region("a", runs=False):
        assert not _core.region_current().runs
        with saver.region("b"):
            assert _core.region_current().runs, "the innermost region has its own settings"
            assert not decorated().runs
            with saver.region("d", runs=False), saver.disable():
                assert not _core.region_current().managed
        saver._impl._binary_wrapper.set_config(tag="e", interesting_region=True, enable_cpu_backup=False)
        assert (_core.region_current().tag, _core.region_current().runs) == ("e", False)


@pytest.mark.parametrize("value", [0, 1, None, "0"])
def test_runs_is_a_bool(saver: TorchMemorySaver, fake_torch: FakeTorch, value: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="runs must be True or False"):
        saver.region("a", runs=value)
