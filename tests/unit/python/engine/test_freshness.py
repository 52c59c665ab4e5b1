"""Guards check_fresh() with a fake torch over the simulated GPU: which memory is looked at, and in which class it is."""

from __future__ import annotations

from typing import Any

import pytest
from core_regions import core_region
from fake_torch import FakeGraph, FakeTorch
from fresh_checks import FREE, LIVE, MIB, PENDING, cycle, in_region, places

from torch_memory_saver import _core, errors
from torch_memory_saver._engine import freshness
from torch_memory_saver.reports import FreshReport
from torch_memory_saver.saver import TorchMemorySaver

pytestmark = pytest.mark.usefixtures("guard")

#: The fields of a report that add up to all memory that it is about.
CLASSES = ("checked_bytes", "ignored_bytes", "new_bytes", "restored_bytes", "zeroed_bytes", "never_paused_bytes")
CLASSES += ("unguarded_bytes", "graph_bytes")


def total(report: FreshReport) -> int:
    return sum(getattr(report, name) for name in CLASSES)


# What is found.


def test_what_nothing_has_written_since_the_resume_is_found(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    forgotten, restored = in_region(saver, fake_torch), in_region(saver, fake_torch, size=4 * MIB)
    cycle(saver)
    simulator.write(restored, bytes(4 * MIB))
    report = saver.check_fresh("w")
    assert places(report.unwritten) == [(forgotten, 2 * MIB)]
    (block,) = report.unwritten
    assert (block.tag, block.device, block.dtype, block.shape, block.names, block.stack) == ("w", 0, "", (), (), None)
    assert block.sampled_bytes == block.unwritten_bytes == freshness.PARTS * freshness.PART_BYTES
    assert not report.is_fresh
    assert (report.checked_blocks, report.checked_bytes, report.unwritten_bytes) == (2, 6 * MIB, 2 * MIB)
    assert report.sampled_bytes == 2 * freshness.PARTS * freshness.PART_BYTES
    simulator.write(forgotten, bytes(2 * MIB))
    assert saver.check_fresh().is_fresh
    assert saver.check_fresh() == saver.check_fresh("w")


def test_only_live_blocks_count_in_the_size_that_was_requested(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    address = in_region(saver, fake_torch)
    sizes: Any = [(512, LIVE, {"requested_size": 4}), (1024, FREE, {}), (512, PENDING, {}), (512, LIVE, {})]
    fake_torch.split(address, *sizes, (2 * MIB - 2560, LIVE, {"requested_size": MIB}))
    cycle(saver)
    simulator.write(address + 2048, b"\1" * 512)
    report = saver.check_fresh()
    assert places(report.unwritten) == [(address + 2560, MIB), (address, 4)]
    assert (report.checked_blocks, total(report)) == (3, 4 + 512 + MIB)
    simulator.write(address, b"\0\0\xff\xff")
    assert places(saver.check_fresh().unwritten) == [(address + 2560, MIB)]


def test_a_part_that_holds_the_pattern_is_another_class(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    address = in_region(saver, fake_torch)
    cycle(saver)
    simulator.write(address, bytes(MIB))
    report = saver.check_fresh()
    assert report.is_fresh
    (block,) = report.partly_written
    assert block.unwritten_bytes == block.sampled_bytes // 2
    simulator.write(address, bytes(2 * MIB))
    simulator.write(address + 70_000, b"\xff" * 8192)
    assert saver.check_fresh().partly_written == ()
    whole = saver.check_fresh(whole=True)
    assert [block.unwritten_bytes for block in whole.partly_written] == [4096]
    assert (whole.whole, whole.sampled_bytes) == (True, 2 * MIB)


def test_where_memory_was_allocated_is_said_if_it_was_recorded(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    address = in_region(saver, fake_torch)
    frames = [
        {"filename": "/srv/engine/rope.py", "line": 31, "name": "__init__"},
        {"filename": "/srv/engine/main.py", "line": 5, "name": "main"},
    ]
    recorded = {"frames": frames}
    fake_torch.split(address, (MIB, LIVE, recorded), (512, LIVE, recorded), (MIB - 512, LIVE, {"frames": []}))
    cycle(saver)
    report = saver.check_fresh()
    groups = [(None if stack is None else stack.frames[0].line, len(blocks)) for stack, blocks in report.by_stack]
    assert groups == [(31, 2), (None, 1)]
    text = str(report)
    assert text.count("at /srv/engine/rope.py:31 __init__") == 1
    assert "by /srv/engine/main.py:5 main" in text


def test_memory_that_torch_does_not_know_is_a_block(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with core_region("w", _core.BACKUP_NONE, True):
        address = _core.allocate(3 * MIB, 0)
    cycle(saver)
    assert places(saver.check_fresh().unwritten) == [(address, 3 * MIB)]
    simulator.write(address, bytes(3 * MIB))
    assert saver.check_fresh().is_fresh


# What is not found.


def test_each_class_of_memory_without_findings(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    in_region(saver, fake_torch, "kept", enable_cpu_backup=True)
    in_region(saver, fake_torch, "zeroed", 4 * MIB)
    in_region(saver, fake_torch, "unguarded", 6 * MIB)
    in_region(saver, fake_torch, "found", 8 * MIB)
    saver.guard = False
    cycle(saver, "unguarded")
    saver.guard = True
    cycle(saver, ["kept", "found"])
    cycle(saver, "zeroed", zero=True)
    in_region(saver, fake_torch, "active", 10 * MIB)
    report = saver.check_fresh()
    assert (report.restored_bytes, report.zeroed_bytes, report.unguarded_bytes) == (2 * MIB, 4 * MIB, 6 * MIB)
    assert (report.checked_bytes, report.never_paused_bytes) == (8 * MIB, 10 * MIB)
    assert total(report) == 30 * MIB
    assert [block.tag for block in report.unwritten] == ["found"]
    assert saver.check_fresh(["kept", "zeroed"]).is_fresh
    saver.pause("kept", backup="discard")
    saver.resume("kept")
    assert saver.check_fresh("kept").unwritten_bytes == 2 * MIB
    saver.pause("found", backup="host")
    saver.resume("found")
    assert saver.check_fresh("found") == FreshReport(restored_bytes=8 * MIB)


def test_every_kind_of_contents_has_its_class() -> None:
    kinds = {value for name, value in vars(_core).items() if name.startswith("CONTENTS_")}
    assert kinds - {_core.CONTENTS_GUARD} == set(freshness._NOTHING_TO_FIND)
    assert set(freshness._NOTHING_TO_FIND.values()) < set(CLASSES)


def test_a_block_that_is_younger_than_the_resume_is_no_leftover(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    address = in_region(saver, fake_torch)
    fake_torch.split(address, (MIB, LIVE), (MIB, FREE))
    saver.pause()
    saver.resume()
    fake_torch.split(address, (MIB, LIVE), (512, LIVE), (MIB - 512, FREE))
    report = saver.check_fresh()
    assert places(report.unwritten) == [(address, MIB)]
    assert report.new_bytes == 512
    fake_torch.split(address, (MIB // 2, LIVE), (MIB // 2, LIVE), (MIB, LIVE))
    report = saver.check_fresh()
    assert (report.unwritten, report.new_bytes) == ((), 2 * MIB)
    cycle(saver)
    assert saver.check_fresh().unwritten_bytes == 2 * MIB


def test_what_was_freed_while_it_was_paused_is_new_when_it_comes_back(
    saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    address = in_region(saver, fake_torch)
    fake_torch.split(address, (MIB, LIVE), (MIB, LIVE))
    saver.pause()
    fake_torch.split(address, (MIB, LIVE), (MIB, FREE))
    saver.resume()
    fake_torch.split(address, (MIB, LIVE), (MIB, LIVE))
    report = saver.check_fresh()
    assert (report.unwritten_bytes, report.new_bytes) == (MIB, MIB)


def test_a_resume_that_failed_leaves_the_record_of_the_next(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    address = in_region(saver, fake_torch)
    saver.pause()
    simulator.fail_after("cuMemCreate", 0, 1, 304)
    with pytest.raises(errors.DriverError):
        saver.resume()
    fake_torch.split(address, (MIB, LIVE), (MIB, FREE))
    saver.resume(wait=False).wait()
    fake_torch.split(address, (MIB, LIVE), (MIB, LIVE))
    assert saver.check_fresh().new_bytes == MIB


def test_a_resume_of_one_tag_keeps_the_record_of_others(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    first, second = in_region(saver, fake_torch, "a"), in_region(saver, fake_torch, "b")
    for address in (first, second):
        fake_torch.split(address, (MIB, LIVE), (MIB, FREE))
    saver.pause()
    saver.resume("a")
    saver.resume("b")
    saver.resume()
    for address in (first, second):
        fake_torch.split(address, (MIB, LIVE), (MIB, LIVE))
    assert saver.check_fresh().new_bytes == 2 * MIB


def test_a_resume_that_was_not_recorded_makes_all_blocks_old(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """A caller of the C functions has made it."""
    address = in_region(saver, fake_torch)
    _core.pause(None, None)
    _core.resume(None, None)
    assert places(saver.check_fresh().unwritten) == [(address, 2 * MIB)]


def test_pools_of_graphs_are_a_class(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with saver.cuda_graph(FakeGraph(), tag="graph"):  # type: ignore[arg-type]
        address = fake_torch.allocate(2 * MIB)
    fake_torch.split(address, (MIB, LIVE), (MIB, FREE))
    cycle(saver)
    simulator.write(address, bytes(MIB))
    report = saver.check_fresh()
    assert report.is_fresh
    assert (report.graph_bytes, report.graph_unwritten_bytes, report.checked_blocks) == (2 * MIB, MIB, 0)
    fake_torch.free(address)


# What is ignored.


def test_ignored_tags_are_a_class_and_may_be_paused(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    weights, cache = in_region(saver, fake_torch, "e0/weights"), in_region(saver, fake_torch, "e0/kv_cache", 4 * MIB)
    saver.pause()
    saver.resume("e0/weights")
    with pytest.raises(errors.InvalidStateError, match="'e0/kv_cache' is paused"):
        saver.check_fresh()
    report = saver.check_fresh(ignore="*/kv_cache")
    assert places(report.unwritten) == [(weights, 2 * MIB)]
    assert (report.ignored_bytes, report.ignored) == (0, ())
    saver.resume()
    report = saver.check_fresh(ignore=["e0/kv_cache"])
    assert places(report.unwritten) == [(weights, 2 * MIB)]
    assert places(report.ignored) == [(cache, 4 * MIB)]
    assert report.ignored_bytes == 4 * MIB
    assert saver.check_fresh("e0/*", ignore=["e0/*"]).is_fresh
    simulator.write(cache, b"\0")
    assert saver.check_fresh("*", ignore=("e?/kv*",)).ignored == (), "it is in use"


# Several devices and threads.


def test_two_devices(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    fake_torch.devices, fake_torch.active_devices = 2, 0b11
    first, second = in_region(saver, fake_torch), in_region(saver, fake_torch, device=1)
    cycle(saver)
    report = saver.check_fresh()
    assert {(block.address, block.device) for block in report.unwritten} == {(first, 0), (second, 1)}
    simulator.write(second, bytes(2 * MIB))
    assert places(saver.check_fresh().unwritten) == [(first, 2 * MIB)]


def test_memory_that_another_thread_frees_meanwhile_is_no_finding(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with core_region("w", _core.BACKUP_NONE, True):
        freed, kept = _core.allocate(2 * MIB, 0), _core.allocate(2 * MIB, 0)
    cycle(saver)
    count = _core.count_guard_bytes

    def free_and_count(*arguments: Any, **options: Any) -> Any:
        _core.free(freed)
        return count(*arguments, **options)

    monkeypatch.setattr(_core, "count_guard_bytes", free_and_count)
    assert places(saver.check_fresh().unwritten) == [(kept, 2 * MIB)]
