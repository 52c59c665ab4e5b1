"""Guards check_fresh() with a fake torch over the simulated GPU: which memory is looked at, in which class it is, when the
check refuses, what it costs, and its report. tests/gpu/test_check_fresh.py does the same with PyTorch."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from core_regions import core_region
from fake_torch import FakeGraph, FakeTorch

from torch_memory_saver import _core, errors
from torch_memory_saver._engine import engine
from torch_memory_saver._engine.tensors import freshness
from torch_memory_saver.reports import FreshReport, UnwrittenBlock
from torch_memory_saver.saver import TorchMemorySaver

pytestmark = pytest.mark.usefixtures("guard")

MIB = 1 << 20
#: States of a block, in PyTorch's words.
LIVE, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"
#: The fields of a report that add up to all memory that it is about.
CLASSES = ("checked_bytes", "ignored_bytes", "new_bytes", "restored_bytes", "zeroed_bytes", "never_paused_bytes")
CLASSES += ("unguarded_bytes", "graph_bytes")


def in_region(
    saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str = "w", size: int = 2 * MIB, device: int = 0, **settings: Any
) -> int:
    with saver.region(tag, **settings):
        return fake_torch.allocate(size, device)


def cycle(saver: TorchMemorySaver, tags: Any = None, **options: Any) -> None:
    saver.pause(tags)
    saver.resume(tags, **options)


def places(blocks: tuple[UnwrittenBlock, ...]) -> list[tuple[int, int]]:
    return [(block.address, block.bytes) for block in blocks]


def total(report: FreshReport) -> int:
    return sum(getattr(report, name) for name in CLASSES)


# Findings.


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


def test_memory_that_torch_does_not_know_is_a_block(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    with core_region("w", _core.BACKUP_NONE, True):
        address = _core.allocate(3 * MIB, 0)
    cycle(saver)
    assert places(saver.check_fresh().unwritten) == [(address, 3 * MIB)]
    simulator.write(address, bytes(3 * MIB))
    assert saver.check_fresh().is_fresh


# Memory without findings.


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


# Ignored memory.


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


# Refusals.


@pytest.mark.parametrize("wrong", [3, b"tag", [3], {"a": 1}, None])
def test_what_cannot_be_ignored_is_refused(saver: TorchMemorySaver, fake_torch: FakeTorch, wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="ignore takes tags, tensors, modules"):
        saver.check_fresh(ignore=wrong)
    with pytest.raises(errors.InvalidArgumentError):
        saver.check_fresh(ignore=[""])


@pytest.mark.parametrize("wrong", [3, "model", [3]])
def test_what_is_no_module_is_refused(saver: TorchMemorySaver, fake_torch: FakeTorch, wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="check_fresh: modules takes"):
        saver.check_fresh(modules=wrong)


def test_without_guard_mode_there_is_nothing_to_see(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    in_region(saver, fake_torch)
    cycle(saver)
    saver.guard = False
    with pytest.raises(errors.InvalidStateError, match=r"guard mode is off.*torch_memory_saver\.guard = True") as caught:
        saver.check_fresh()
    assert caught.value.operation == "check_fresh"


def test_memory_that_is_not_resident_is_refused(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any) -> None:
    in_region(saver, fake_torch, "a")
    in_region(saver, fake_torch, "b")
    in_region(saver, fake_torch, "c")
    cycle(saver, "c")
    saver.pause(["a", "b"])
    with pytest.raises(errors.InvalidStateError, match=r"'a' is paused: resume it first.*concerned are 'a', 'b'") as caught:
        saver.check_fresh()
    assert (caught.value.tag, caught.value.bytes, caught.value.device) == ("a", 4 * MIB, 0)
    with pytest.raises(errors.InvalidStateError, match="'b' is paused"):
        saver.check_fresh(["b", "c"])
    assert saver.check_fresh("c").unwritten_bytes == 2 * MIB
    saver.resume()
    simulator.fail_after("cuMemUnmap", 0, 1, 304)
    with pytest.raises(errors.DriverError):
        saver.pause("a")
    simulator.fail_after("cuMemUnmap", 0, 1000, 304)
    with pytest.raises(errors.InvalidStateError, match="'a' is damaged: call resume"):
        saver.check_fresh("a")
    simulator.stop_failing()
    saver.resume()
    assert saver.check_fresh("a").unwritten_bytes == 2 * MIB


def test_a_resume_that_goes_on_is_refused(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, context: None
) -> None:
    address, other = in_region(saver, fake_torch), in_region(saver, fake_torch, "other")
    saver.pause("w")
    gate = simulator.new_gate()
    simulator.launch_add(other, MIB, 1, gate=gate)
    pending = saver.resume("w", wait=False)
    simulator.wait_until_synchronizing()  # for late reads
    with pytest.raises(errors.InvalidStateError, match=r"'w' is being resumed: wait\(\) for it"):
        saver.check_fresh("w")
    simulator.open_gate(gate)
    pending.wait()
    assert places(saver.check_fresh("w").unwritten) == [(address, 2 * MIB)]


def test_inside_a_pause_it_is_refused(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    in_region(saver, fake_torch, enable_cpu_backup=True)
    caught: list[BaseException] = []

    def tell(done: int, size: int) -> None:
        try:
            saver.check_fresh()
        except errors.InvalidStateError as error:
            caught.append(error)

    saver.pause(progress=tell)
    saver.resume()
    assert caught
    assert "check_fresh: this thread is inside pause() or resume()" in str(caught[0])


def test_memory_that_another_thread_pauses_meanwhile_is_refused(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region(saver, fake_torch)
    cycle(saver)
    count = _core.count_guard_bytes

    def pause_and_count(*arguments: Any, **options: Any) -> Any:
        thread = threading.Thread(target=saver.pause)
        thread.start()
        thread.join()
        return count(*arguments, **options)

    monkeypatch.setattr(_core, "count_guard_bytes", pause_and_count)
    with pytest.raises(errors.InvalidStateError, match="'w' is paused"):
        saver.check_fresh()
    monkeypatch.undo()
    saver.resume()


# The cost of a check.


def test_nothing_is_recorded_where_guard_mode_is_off(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region(saver, fake_torch)
    noted: list[Any] = []
    monkeypatch.setattr(engine.resumed_blocks, "note", lambda *arguments: noted.append(arguments))
    saver.guard = False
    cycle(saver)
    assert noted == []
    saver.guard = True
    cycle(saver)
    assert len(noted) == 1


def test_the_record_costs_no_driver_call(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region(saver, fake_torch)
    cycle(saver)

    def calls() -> list[str]:
        simulator.start_trace()
        cycle(saver)
        return list(simulator.trace())

    recorded = calls()
    monkeypatch.setattr(engine.resumed_blocks, "note", lambda *arguments: None)
    assert calls() == recorded


def test_a_check_copies_by_few_calls_and_runs_no_kernel(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    address = in_region(saver, fake_torch, size=16 * MIB)
    fake_torch.split(address, *[(64 << 10, LIVE)] * 256)
    cycle(saver)
    contents = simulator.read(address, 16 * MIB)
    simulator.start_trace()
    report = saver.check_fresh()
    made = simulator.trace()
    assert len(report.unwritten) == 256
    assert made.count("cuMemcpyBatchAsync") <= 256 * freshness.PARTS // 64
    assert made.count("cuMemcpyDtoHAsync") <= 1, "the last one, if it is alone"
    assert not [name for name in made if "Launch" in name or "Memset" in name or "HtoD" in name or "MemMap" in name]
    assert simulator.read(address, 16 * MIB) == contents


# The report.


def test_the_report_as_a_table() -> None:
    def block(address: int, **others: Any) -> UnwrittenBlock:
        sizes: dict[str, Any] = {"bytes": 1 << 20, "sampled_bytes": 512, "unwritten_bytes": 512}
        return UnwrittenBlock(**({"address": address, "device": 0, "tag": "weights"} | sizes | others))

    named = block(4096, dtype="float32", shape=(4096, 64), names=("Engine.rope.cos",))
    report = FreshReport(
        unwritten=(named, block(8192, bytes=4)),
        integers=(block(0, dtype="int32", shape=(8,), names=("A.a", "B.b", "C.c")),),
        partly_written=(block(1, unwritten_bytes=128),),
        ignored=(block(2, tag="kv_cache", bytes=3 << 30),),
        checked_blocks=7,
        checked_bytes=5 << 30,
        ignored_bytes=3 << 30,
        restored_bytes=700,
        graph_bytes=2 << 20,
        graph_unwritten_bytes=1 << 20,
        sampled_bytes=4096,
        hidden_objects=9,
    )
    assert str(report) == (
        "check_fresh: 2 findings in 7 blocks, 1 MiB of 5 GiB not written since the resume\n"
        "looked at 4 KiB, in samples; whole=True reads from end to end\n"
        "gc.freeze() hides objects of this process: pass modules=... to see their names\n"
        "\n"
        "Not written since the resume\n"
        "  1 MiB  Engine.rope.cos  float32 (4096, 64)  weights  device 0, 0x1000\n"
        "    4 B  -                no tensor found     weights  device 0, 0x2000\n"
        "\n"
        "Integers of -1 (255 in uint8): not restored, or written so\n"
        "  1 MiB  A.a, B.b and 1 more  int32 (8,)  weights  device 0, 0x0\n"
        "\n"
        "Written in parts: a cache that fills up, or a restoration that ended early\n"
        "  1 MiB  -  no tensor found  weights  device 0, 0x1  25% of it\n"
        "\n"
        "Ignored, and not written\n"
        "  3 GiB  -  no tensor found  kv_cache  device 0, 0x2\n"
        "\n"
        "Other memory, in which nothing counts as a finding\n"
        "  3 GiB  ignored\n"
        "  2 MiB  in pools of CUDA graphs, 1 MiB of it not written since the resume\n"
        "  700 B  restored from a backup\n"
    )
    many = FreshReport(unwritten=(named,) * 25, whole=True)
    assert "and 5 more" in str(many)
    assert "read from end to end" in str(many)
    assert str(FreshReport(checked_blocks=3)).startswith("check_fresh: no findings in 3 blocks, 0 B of 0 B not written")
    assert str(FreshReport(unwritten=(named,), checked_blocks=1)).startswith("check_fresh: 1 finding in 1 block,")


def test_the_report_as_json(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    address = in_region(saver, fake_torch)
    frames = [{"filename": "/srv/engine/rope.py", "line": 31, "name": "__init__"}]
    fake_torch.split(address, (2 * MIB, LIVE, {"frames": frames}))
    cycle(saver)
    report = saver.check_fresh()
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["unwritten"][0]["stack"]["frames"] == frames
    assert plain["unwritten"][0] | {"stack": None} == {
        "address": address,
        "bytes": 2 * MIB,
        "sampled_bytes": 512,
        "unwritten_bytes": 512,
        "device": 0,
        "tag": "w",
        "dtype": "",
        "shape": [],
        "names": [],
        "stack": None,
    }
    assert set(plain) == set(FreshReport.__dataclass_fields__)
    assert plain["checked_bytes"] == 2 * MIB
