"""Guards when check_fresh() refuses: with wrong arguments, without guard mode, and where memory is not resident. A check
that refuses or fails changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_torch import FakeTorch
from fresh_checks import MIB, cycle, in_region, places

from torch_memory_saver import _core, errors
from torch_memory_saver.saver import TorchMemorySaver

pytestmark = pytest.mark.usefixtures("guard")


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


def test_a_capture_is_refused_before_anything_changes(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    in_region(saver, fake_torch)
    cycle(saver)
    _core.capture_begin(None, 0)
    before = _core.segments()
    with pytest.raises(errors.CaptureInProgressError, match="check_fresh"):
        saver.check_fresh()
    assert _core.segments() == before
    _core.capture_end()
    assert not saver.check_fresh().is_fresh


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


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuStreamCreate", "cuStreamSynchronize", "cuDevicePrimaryCtxRetain"])
def test_a_failed_call_changes_nothing(saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, call: str) -> None:
    address = in_region(saver, fake_torch)
    cycle(saver)
    before = _core.segments()
    simulator.fail_after(call, 0, 1, 304)
    with pytest.raises(errors.DriverError) as caught:
        saver.check_fresh()
    assert (caught.value.operation, caught.value.driver_call) == ("check_fresh", call)
    assert _core.segments() == before
    assert places(saver.check_fresh().unwritten) == [(address, 2 * MIB)]
