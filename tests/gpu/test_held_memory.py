"""Guards resumes without enough memory, because another process or this one holds it: resume fails and leaves everything
paused, or waits; processes take turns by memory and by the devices' locks."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_support import (
    LARGE,
    MIB,
    SIMULATED,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    saver,
    take_all_but,
    torch,
)
from second_process import SecondProcess
from waiting import interrupt, while_waiting
from weights_and_cache import PATIENCE_S, assert_all_there, states, weights_and_cache

ROUNDS = 5 if SIMULATED else 20
#: Enough for one of two_processes(), not for both.
ENOUGH_FOR_ONE = LARGE * 3 // 2
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
#: Sizes in messages have one digit after the point; those of these tests are below 1 TiB.
ROUNDING = UNITS["GiB"] // 20 + 1


def size_of(text: str) -> int:
    """The bytes of a size in a message, such as "1.5 GiB"."""
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def test_resume_while_another_process_holds_the_memory_and_after_it_was_freed() -> None:
    tensors, sums = weights_and_cache()
    with SecondProcess() as other:
        saver.pause()
        other.do("hold", LARGE)
        free, before = free_bytes(), core.counters()
        for timeout in (None, 0.2):
            with pytest.raises(errors.OutOfMemoryError) as caught:
                saver.resume(timeout=timeout)
            message = str(caught.value)
            assert isinstance(caught.value, torch.OutOfMemoryError)
            assert (caught.value.device, caught.value.driver_call) == (0, "cuMemCreate")
            first, *points = message.splitlines()
            found = re.match(r"resume: device 0 needs (.+?) and has (.+?) free: (.+?) are missing", first)
            assert found, message
            needed, free_then, missing = (size_of(text) for text in found.groups())
            assert_close_to(needed, before["paused_bytes"], "needed memory in the message", slack=ROUNDING)
            assert_close_to(missing, needed - free_then, "missing memory in the message", slack=2 * ROUNDING)
            assert_close_to(free_then, free, "free memory in the message", slack=4 * MIB + ROUNDING)
            assert (" seconds" in first[found.end() :]) == (timeout is not None), message
            assert any("CUDA_ERROR_OUT_OF_MEMORY" in point for point in points), message
            assert states(tensors) == {core.STATE_PAUSED}
            assert_close_to(free_bytes(), free, "free memory after the failed resume", slack=4 * MIB)
            now = core.counters()
            for name in ("resident_bytes", "paused_bytes", "host_backup_bytes", "damaged", "quarantined_handles"):
                assert now[name] == before[name], name
        other.do("give_back")
        assert saver.resume().allocations == len(tensors)
    assert_all_there(tensors, sums)


@pytest.mark.parametrize("how", ["freed", "killed"])
def test_resume_waits_until_the_other_process_frees_the_memory_or_is_killed(how: str) -> None:
    tensors, sums = weights_and_cache()
    saver.pause()
    with SecondProcess() as other:
        other.do("hold", LARGE)
        act: Callable[[], None] = other.kill if how == "killed" else lambda: other.do("give_back")
        with while_waiting(act, lambda: states(tensors) == {core.STATE_PAUSED}):
            report = saver.resume(timeout=PATIENCE_S)
        assert report.allocations == len(tensors)
        assert_all_there(tensors, sums)


def test_resume_waits_on_a_thread_that_no_signal_reaches() -> None:
    tensors, sums = weights_and_cache()
    saver.pause()
    other = [take_all_but(LARGE)]
    reports: list[object] = []
    thread = threading.Thread(target=lambda: reports.append(saver.resume(timeout=PATIENCE_S)))
    thread.start()
    other.clear()
    torch.cuda.empty_cache()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and len(reports) == 1
    assert_all_there(tensors, sums)


@contextlib.contextmanager
def two_processes(tmp_path: Path, left: int | None) -> Iterator[tuple[SecondProcess, SecondProcess]]:
    """Two processes with paused memory of LARGE each. With `left`, only this much of the device is free."""
    environment = (("TMS_LOCK_DIR", str(tmp_path)),)
    with SecondProcess(environment) as one, SecondProcess(environment) as two:
        for process in (one, two):
            process.tell("allocate", "weights", LARGE // 4, "pinned")
        for process in (one, two):
            assert process.answer() == "ok"
            process.do("allocate", "weights", LARGE // 4, "mmap")
            process.do("allocate", "kv_cache", LARGE // 2, "none")
            process.do("check")
            process.do("pause")
        filler = None if left is None else take_all_but(left)
        yield one, two
        del filler
        torch.cuda.empty_cache()


@pytest.mark.parametrize("exclusive", [0, 1], ids=["by memory", "exclusive"])
def test_two_processes_in_opposite_phase_take_turns(exclusive: int, tmp_path: Path) -> None:
    """Each resumes while the other holds what it needs, and waits for it: memory, or the lock."""
    with two_processes(tmp_path, None if exclusive else ENOUGH_FOR_ONE) as (one, two):
        active, waiting = one, two
        active.do("resume", 0, exclusive)
        for _ in range(ROUNDS):
            waiting.tell("resume_reporting", PATIENCE_S, exclusive)
            assert waiting.answer() == "waiting"
            active.do("check")
            active.do("pause")
            assert waiting.answer() == "ok"
            active, waiting = waiting, active
        active.do("check")
        active.do("pause")


def test_who_resumes_again_comes_after_who_waits(tmp_path: Path) -> None:
    def wait_for_ticket() -> None:
        while not list(tmp_path.glob("*.ticket")):
            time.sleep(0)

    with two_processes(tmp_path, None) as (one, two):
        active, waiting = one, two
        active.do("resume", 0, 1)
        waiting.tell("resume", PATIENCE_S, 1)
        for _ in range(ROUNDS):
            wait_for_ticket()
            active.do("pause")
            active.tell("resume", PATIENCE_S, 1)
            assert waiting.answer() == "ok"
            active, waiting = waiting, active
        active.do("pause")
        assert waiting.answer() == "ok"


@pytest.mark.parametrize("exclusive", [0, 1], ids=["by memory", "exclusive"])
def test_two_processes_that_pause_and_resume_as_fast_as_they_can(exclusive: int, tmp_path: Path) -> None:
    """Neither deadlock nor livelock, and with exclusive=True never both at once, although there is memory for both."""
    with two_processes(tmp_path, None if exclusive else ENOUGH_FOR_ONE) as both:
        for process in both:
            process.tell("rounds", ROUNDS, PATIENCE_S, exclusive, tmp_path / "inside")
        assert [process.answer() for process in both] == ["ok", "ok"]
        for process in both:
            process.do("resume", PATIENCE_S, exclusive)
            process.do("check")
            process.do("pause")


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with two_processes(tmp_path, None) as (one, two):
        one.do("resume", 0, 1)
        two.refuses("DeviceLockedError", "resume", 0, 1)
        two.refuses("DeviceLockedError", "resume", 0.2, 1)
        two.tell("resume_reporting", PATIENCE_S, 1)
        assert two.answer() == "waiting"
        one.kill()
        assert two.answer() == "ok"
        two.do("check")


@pytest.mark.parametrize("seconds", [PATIENCE_S, float("inf")])
def test_ctrl_c_during_a_resume_that_waits_for_memory(seconds: float) -> None:
    tensors, sums = weights_and_cache()
    saver.pause()
    other = take_all_but(LARGE)
    free = free_bytes()
    with pytest.raises(KeyboardInterrupt), while_waiting(interrupt, lambda: states(tensors) == {core.STATE_PAUSED}):
        saver.resume(timeout=seconds)
    assert states(tensors) == {core.STATE_PAUSED}
    assert_close_to(free_bytes(), free, "free memory", slack=4 * MIB)
    del other
    torch.cuda.empty_cache()
    saver.resume()
    assert_all_there(tensors, sums)


@pytest.mark.multigpu
def test_resume_of_two_devices_waits_for_the_one_that_has_no_memory() -> None:
    for device in (0, 1):
        torch.ones(1, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    tensors = []
    for device in (0, 1):
        with saver.region(tag="weights", enable_cpu_backup=True), torch.cuda.device(device):
            tensors.append(empty(2 * LARGE, device))
        fill_random(tensors[device], device)
    sums = [checksum(tensor) for tensor in tensors]
    saver.pause()
    other = [take_all_but(LARGE, 1)]
    free = free_bytes(0)
    with pytest.raises(errors.OutOfMemoryError, match="resume: device 1 needs"):
        saver.resume(timeout=0.2)
    assert states(tensors) == {core.STATE_PAUSED}
    assert_close_to(free_bytes(0), free, "free memory of the device that has enough", slack=4 * MIB)

    def give_back() -> None:
        other.clear()
        torch.cuda.empty_cache()

    with while_waiting(give_back, lambda: states(tensors) == {core.STATE_PAUSED}):
        assert saver.resume(timeout=PATIENCE_S).allocations == 2
    assert_all_there(tensors, sums)
