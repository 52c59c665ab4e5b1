"""Guards compact(), region(runs=) and slack in the statistics: what is returned, what stays as it was, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch, another_thread_inside
from processes import Program
from recorded_hooks import RUN_OF_FOUR, SIZE, Recorder

import torch_memory_saver as package
from torch_memory_saver import _core, errors
from torch_memory_saver._saver.slack import slack_by_place
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver._torch.shared_memory import SharedMemory
from torch_memory_saver.report import CompactReport
from torch_memory_saver.saver import TorchMemorySaver

ERROR_OUT_OF_MEMORY = 2
ERROR_UNKNOWN = 999


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


# -- what it does --------------------------------------------------------------------------------------------------------


def test_slack_is_returned_and_contents_stay(hooks: Recorder, simulator: Any, slack: list[int]) -> None:
    others = RUN_OF_FOUR - 1 - len(slack)
    before = simulator.usage().physical_bytes
    stats = hooks.saver.stats()
    usage = stats.tags[hooks.tag("w")]
    assert (usage.slack_bytes, usage.resident_bytes) == (SIZE, (RUN_OF_FOUR - 1) * SIZE)
    assert stats.devices[0].slack_bytes == stats.total.slack_bytes == stats.slack_bytes == SIZE
    report = hooks.saver.compact(hooks.tag("w"))
    assert isinstance(report, CompactReport)
    assert (report.bytes, report.allocations, report.copied_bytes) == (SIZE, 3, 3 * SIZE)
    assert (report.unknown_tags, report.possibly_shared_bytes) == (0, 0)
    assert before - simulator.usage().physical_bytes == SIZE
    assert_filled(simulator, slack)
    stats = hooks.saver.stats()
    usage = stats.tags[hooks.tag("w")]
    assert (usage.slack_bytes, usage.resident_bytes, usage.paused_bytes) == (0, (len(slack) + others) * SIZE, 0)
    assert stats.slack_bytes == stats.counters["slack_bytes"] == 0


def test_a_pause_returns_slack_too_and_the_resume_maps_none(hooks: Recorder, simulator: Any, slack: list[int]) -> None:
    hooks.saver.pause()
    assert hooks.saver.stats().slack_bytes == simulator.usage().physical_bytes == 0
    hooks.saver.resume()
    assert hooks.saver.stats().slack_bytes == 0
    assert simulator.usage().physical_bytes == (RUN_OF_FOUR - 1) * SIZE


def test_without_slack_nothing_is_done(hooks: Recorder, simulator: Any) -> None:
    hooks.allocate(*["w"] * RUN_OF_FOUR)
    hooks.saver.pause()
    hooks.saver.resume()
    simulator.clear_counts()
    report = hooks.saver.compact()
    assert (report.allocations, report.bytes, report.copied_bytes) == (0, 0, 0)
    assert simulator.calls("cuMemCreate") == simulator.calls("cuMemUnmap") == 0


def test_only_the_tags_of_the_call(hooks: Recorder) -> None:
    hooks.make_slack("a/w")
    hooks.make_slack("b/w", device=1)
    assert slack_by_place() == {(hooks.tag("a/w"), 0): SIZE, (hooks.tag("b/w"), 1): SIZE}
    assert slack_by_place((hooks.tag("b/w"),)) == slack_by_place(None, 1) == {(hooks.tag("b/w"), 1): SIZE}
    report = hooks.saver.compact([hooks.tag("a/*"), hooks.tag("never")])
    assert (report.bytes, report.unknown_tags) == (SIZE, 1)
    assert slack_by_place() == {(hooks.tag("b/w"), 1): SIZE}
    stats = hooks.saver.stats(device=1)
    assert (stats.total.slack_bytes, stats.slack_bytes) == (SIZE, SIZE)
    assert hooks.saver.stats(hooks.tag("a/w")).total.slack_bytes == 0
    assert hooks.saver.compact().bytes == SIZE


def test_paused_memory_is_skipped(hooks: Recorder) -> None:
    hooks.make_slack("a")
    hooks.saver.pause(hooks.tag("a"))
    hooks.make_slack("b")
    assert hooks.saver.compact().bytes == SIZE
    assert slack_by_place() == {}
    assert hooks.saver.stats(hooks.tag("a")).total.resident_bytes == 0


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
    assert saver.stats().slack_bytes == 0
    assert saver.compact("a").bytes == SIZE
    assert_filled(simulator, addresses)
    assert simulator.usage().physical_bytes == (RUN_OF_FOUR - 1) * SIZE


def test_hooks_are_called_for_what_torch_only_caches(
    hooks: Recorder, saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    """It becomes slack before they are looked for."""
    with saver.region(hooks.tag("a")):
        addresses = [fake_torch.allocate(SIZE) for _ in range(RUN_OF_FOUR)]
    saver.pause()
    saver.resume()
    hooks.on_pause("p")
    hooks.on_resume("r")
    fake_torch.free(addresses[-2])
    saver.compact()
    assert hooks.take_events() == ["p before", "r before", "p after", "r after"]


@pytest.mark.parametrize(("live_only", "copied"), [(True, 3 * SIZE - SIZE // 2), (False, 3 * SIZE)])
def test_free_blocks_are_not_copied_unless_requested(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, live_only: bool, copied: int
) -> None:
    with saver.region("a"):
        addresses = [fake_torch.allocate(SIZE) for _ in range(RUN_OF_FOUR)]
    saver.pause()
    saver.resume()
    fake_torch.free(addresses.pop(-2))
    (last,) = (row for row in fake_torch.rows if row.address == addresses[-1])
    last.blocks = [(SIZE // 2, "active_allocated"), (SIZE // 2, "inactive")]
    assert saver.compact("a", live_only=live_only).copied_bytes == copied


def test_the_callback_of_the_copies(hooks: Recorder, slack: list[int]) -> None:
    told: list[tuple[int, int]] = []
    thread = threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == thread
        told.append((done, total))

    hooks.saver.compact(progress=progress)
    assert told[-1] == (3 * SIZE, 3 * SIZE)


def test_the_module_has_it(hooks: Recorder) -> None:
    assert package.compact == package.torch_memory_saver.compact
    assert package.CompactReport is CompactReport


# -- slack itself --------------------------------------------------------------------------------------------------------


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
depth = _core.region_push("w", _core.BACKUP_NONE, True)
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
        patch.setattr(_core, "capture_begin", lambda **named: announced.append(named) or begin(**named))  # type: ignore[func-returns-value]
        yield announced


def test_settings_of_a_graph_and_of_nested_regions(
    saver: TorchMemorySaver, fake_torch: FakeTorch, parameters_of_graphs: list[Any]
) -> None:
    graph = fake_torch.torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph", runs=False):
        pass
    assert [named["runs"] for named in parameters_of_graphs] == [False]
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


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{"tag": 1}, {"progress": 1}, {"if_shared": "no"}, {"if_shared": "wait"}, {"timeout": 1.0}],
)
def test_arguments_that_are_refused(hooks: Recorder, arguments: dict[str, Any]) -> None:
    hooks.make_slack("w")
    with pytest.raises(errors.InvalidArgumentError):
        hooks.saver.compact(**arguments)
    assert hooks.saver.stats().slack_bytes == SIZE


@pytest.mark.parametrize("value", [0, 1, None, "0"])
def test_runs_is_a_bool(saver: TorchMemorySaver, fake_torch: FakeTorch, value: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="runs must be True or False"):
        saver.region("a", runs=value)


def test_a_region_of_another_thread(hooks: Recorder, fake_torch: FakeTorch) -> None:
    hooks.make_slack("w", backup=_core.BACKUP_PINNED)  # not the kind of what the other thread allocates
    with (
        another_thread_inside(hooks.saver, fake_torch, hooks.tag("w")),
        pytest.raises(errors.InvalidStateError, match="compact that tag after it has left") as caught,
    ):
        hooks.saver.compact(hooks.tag("w"))
    assert caught.value.operation == "compact"
    assert hooks.saver.stats().slack_bytes == SIZE


def test_a_capture(hooks: Recorder) -> None:
    hooks.make_slack("w")
    identity = _core.capture_begin(None, _core.BACKUP_NONE)
    with pytest.raises(errors.CaptureInProgressError):
        hooks.saver.compact()
    _core.capture_end(identity)
    assert hooks.saver.compact().bytes == SIZE


def test_inside_a_callback(hooks: Recorder) -> None:
    hooks.make_slack("w")
    hooks.on_pause("p")
    hooks.does["p", "before"] = hooks.saver.compact
    with pytest.raises(errors.InvalidStateError, match=r"^compact: this thread is inside"):
        hooks.saver.pause()
    with pytest.raises(errors.InvalidStateError, match=r"^compact: this thread is inside"):
        hooks.saver.compact()


def test_memory_that_others_may_still_use(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tags with slack are looked at: what is not moved does not matter."""
    asked: list[Any] = []
    monkeypatch.setattr(SharedMemory, "possibly_shared_bytes", lambda self, tags: asked.append(tags) or 7)  # type: ignore[func-returns-value]
    hooks.make_slack("w")
    hooks.allocate("other")
    report = hooks.saver.compact()
    assert report.possibly_shared_bytes == 7
    assert asked == [(hooks.tag("w"),)]


def test_without_slack_nobody_who_shares_is_waited_for(hooks: Recorder, fake_torch: FakeTorch) -> None:
    hooks.allocate("w")
    assert hooks.saver.compact(if_shared="refuse").bytes == 0
    assert hooks.saver.compact(if_shared="wait", timeout=60).bytes == 0


# -- what fails ----------------------------------------------------------------------------------------------------------


def test_the_second_half_fails(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, simulator: Any) -> None:
    """The memory is paused with its contents, is not handed out, and a resume brings it back."""
    with saver.region("a"):
        addresses = [fake_torch.allocate(SIZE) for _ in range(RUN_OF_FOUR - 2)]
        with saver.region("a"):  # another pool: the first one stays when this is emptied
            freed = fake_torch.allocate(SIZE)
        addresses.append(fake_torch.allocate(SIZE))
    saver.pause()
    saver.resume()
    fake_torch.free(freed)
    saver.empty_cache()
    fill(simulator, addresses)
    simulator.fail_after("cuMemCreate", 0, 1 << 30, ERROR_OUT_OF_MEMORY)
    with saver.region("a"):
        with pytest.raises(errors.OutOfMemoryError, match="resume"):
            saver.compact("a")
        simulator.stop_failing()
        paused = [row.address for row in saver.stats().allocations if row.state == "paused"]
        assert sorted(paused) == sorted(addresses[-3:])
        fake_torch.free(addresses.pop())  # an idle block, paused: what torch would hand out next
        assert fake_torch.allocate(SIZE) not in paused
    saver.resume()
    assert_filled(simulator, addresses)
    assert saver.stats().slack_bytes == 0


def test_a_copy_to_host_memory_that_fails_changes_nothing(hooks: Recorder, simulator: Any, slack: list[int]) -> None:
    simulator.fail_after("cuMemcpyDtoHAsync_v2", 0, 1 << 30, ERROR_UNKNOWN)
    with pytest.raises(errors.DriverError, match="cuMemcpyDtoHAsync"):
        hooks.saver.compact()
    simulator.stop_failing()
    assert hooks.saver.stats().slack_bytes == SIZE
    assert_filled(simulator, slack)
    assert hooks.saver.compact().bytes == SIZE


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_progress_that_raises(hooks: Recorder, simulator: Any, slack: list[int], kind: type[BaseException]) -> None:
    raised = kind("no")

    def progress(done: int, total: int) -> None:
        raise raised

    with pytest.raises(kind) as caught:
        hooks.saver.compact(progress=progress)
    assert caught.value is raised
    hooks.saver.resume()
    assert_filled(simulator, slack)
