"""Guards resume(wait=False) on the simulated GPU: the returned object, its end, and signals during the wait for it."""

from __future__ import annotations

import ctypes
import gc
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.pending import PendingResume, PendingResumes
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError, OutOfMemoryError
from torch_memory_saver.reports.transitions import ResumeReport

MIB = 1 << 20
SIZE = 8 * MIB
#: Seconds until a timer fires, which is restarted until the tested call has begun.
SOON_S = 0.01
PATTERN = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def address(simulator: Any) -> Iterator[int]:
    """A paused allocation with contents."""
    with core_region("pending", _core.BACKUP_PINNED, True):
        made = _core.allocate(SIZE, 0)
    simulator.write(made, PATTERN)
    _core.pause(("pending",), None)
    yield made
    simulator.set_bandwidth(0)
    _core.free(made)


def begin(**options: Any) -> PendingResume:
    return PendingResume(_core.resume_begin(("pending",), None, **options))


def test_wait_returns_the_report_as_often_as_one_likes(simulator: Any, address: int) -> None:
    pending = begin()
    report = pending.wait()
    assert isinstance(report, ResumeReport)
    assert (report.allocations, report.bytes, report.copied_bytes) == (1, SIZE, SIZE)
    assert pending.done
    assert pending.wait() == report
    assert simulator.read(address, SIZE) == PATTERN


def test_a_pending_resume_is_printed_for_people(simulator: Any, address: int) -> None:
    simulator.hold_copies()
    pending = PendingResume(_core.resume_begin(("pending",), None), tags=("pending",))
    assert str(pending) == "<PendingResume of pending, under way>"
    simulator.set_bandwidth(0)
    pending.wait()
    assert str(pending) == "<PendingResume of pending, ended>"
    _core.pause(("pending",), None)
    everything = begin()
    assert str(everything).startswith("<PendingResume of everything, ")
    everything.wait()


def test_a_dropped_pending_resume_continues(simulator: Any, address: int) -> None:
    simulator.hold_copies()
    begin()
    gc.collect()
    simulator.wait_until_synchronizing()  # the dropped one, for its copies: it has the turn
    simulator.set_bandwidth(0)
    _core.resume(("pending",), None)  # waits for its turn
    assert simulator.read(address, SIZE) == PATTERN


def test_a_stream_waits_for_the_contents(simulator: Any, address: int, context: None) -> None:
    simulator.hold_copies()
    pending = begin()
    pending.wait_stream(0)
    assert simulator.calls("cuStreamWaitEvent") == 1
    simulator.set_bandwidth(0)
    pending.wait()
    assert simulator.read(address, SIZE) == PATTERN
    pending.wait_stream(0)  # it has ended: there is nothing to wait for
    assert simulator.calls("cuStreamWaitEvent") == 1


@pytest.fixture
def cache(simulator: Any) -> Iterator[list[int]]:
    """Paused allocations without contents, enough of them for the driver to be busy when a stream is to wait."""
    with core_region("cache", _core.BACKUP_NONE, True):
        made = [_core.allocate(SIZE, 0) for _ in range(32)]
    _core.pause(("cache",), None)
    yield made
    for each in made:
        _core.free(each)


def test_a_stream_waits_for_memory_without_contents(simulator: Any, cache: list[int], context: None) -> None:
    add = simulator.library.tms_sim_launch_add
    add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
    pending = PendingResume(_core.resume_begin(("cache",), None))
    pending.wait_stream(0)
    assert [add(None, each, SIZE, 1, 0) for each in reversed(cache)] == [0] * len(cache)
    assert simulator.library.cuCtxSynchronize() == 0
    assert pending.wait().allocations == len(cache)


def test_out_of_memory_is_undone_although_a_stream_is_to_wait(simulator: Any, cache: list[int], context: None) -> None:
    taken = _core.device_memory(0).free - SIZE * (len(cache) - 1)
    assert simulator.library.tms_sim_take_memory(0, ctypes.c_int64(taken)) == 0
    pending = PendingResume(_core.resume_begin(("cache",), None))
    with pytest.raises(OutOfMemoryError):
        pending.wait_stream(0)
    with pytest.raises(OutOfMemoryError):
        pending.wait()
    assert {_core.find(each).state for each in cache} == {_core.STATE_PAUSED}  # type: ignore[union-attr]
    assert simulator.library.tms_sim_take_memory(0, ctypes.c_int64(-taken)) == 0
    _core.resume(("cache",), None)


def test_a_thread_without_a_context_has_a_default_stream(simulator: Any, address: int) -> None:
    simulator.hold_copies()
    pending = begin()
    pending.wait_stream(0)
    assert simulator.calls("cuStreamWaitEvent") == 1
    simulator.set_bandwidth(0)
    pending.wait()
    assert simulator.read(address, SIZE) == PATTERN


def test_wait_raises_the_failure(simulator: Any, address: int) -> None:
    simulator.fail_after("cuMemCreate", 0, 1, 2)
    pending = begin()
    for _ in range(2):
        with pytest.raises(OutOfMemoryError) as caught:
            pending.wait()
        assert (caught.value.operation, caught.value.tag) == ("resume", "pending")
    with pytest.raises(OutOfMemoryError):
        pending.wait_stream(0)
    assert pending.done
    assert _core.find(address).state == _core.STATE_PAUSED  # type: ignore[union-attr]
    begin().wait()
    assert simulator.read(address, SIZE) == PATTERN


def test_zero_and_policy_are_passed_on(simulator: Any, address: int) -> None:
    begin(host_memory=_core.HOST_RETAIN).wait()
    assert _core.counters()["host_backup_bytes"] == SIZE
    _core.pause(("pending",), None, backup=_core.BACKUP_NONE)
    begin(zero=True).wait()
    assert simulator.read(address, SIZE) == bytes(SIZE)


def test_a_signal_ends_the_wait_and_not_the_resume(simulator: Any, address: int) -> None:
    class Alarm(Exception):
        pass

    def ring(_: int, frame: FrameType | None) -> None:
        """Raises once the wait has begun; before that the timer is restarted."""
        if frame is not None and frame.f_code is PendingResume._wait.__code__:
            raise Alarm
        signal.setitimer(signal.ITIMER_REAL, SOON_S)

    before = signal.signal(signal.SIGALRM, ring)
    simulator.hold_copies()
    pending = begin()
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        with pytest.raises(Alarm):
            pending.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        simulator.set_bandwidth(0)
    assert pending.wait().copied_bytes == SIZE
    assert simulator.read(address, SIZE) == PATTERN


def test_the_end_of_the_process_stops_one_that_waits_for_memory(program: Callable[..., Any]) -> None:
    done = program(
        """
import ctypes, os
from torch_memory_saver import _core, errors
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_take_memory.argtypes = (ctypes.c_int, ctypes.c_int64)
level = _core.region_enter("a", _core.BACKUP_PINNED, True)
address = _core.allocate(1 << 20, 0)
_core.pause(None, None)
simulator.tms_sim_take_memory(0, _core.device_memory(0).free)
pending = _core.resume_begin(None, None, timeout=3600.0)
_core.close()
print(_core.pending_done(pending))
try:
    _core.pending_wait(pending)
except errors.CallInterruptedError:
    print(_core.find(address).state == _core.STATE_PAUSED)
"""
    )
    assert done.stdout == "True\nTrue\n"


def test_all_pending_resumes_share_the_timeout_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, timeouts = 100.0, []

    def await_end(pending: object, timeout: float, interruptible: bool) -> bool:
        nonlocal now
        timeouts.append(timeout)
        now += 4.0  # until the end of the resume
        return timeout >= 4.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(_core, "pending_await", await_end)
    monkeypatch.setattr(_core, "pending_done", lambda pending: False)
    resumes = PendingResumes()
    for tag in ("a", "b", "c", "d"):
        resumes.add(object(), None, (tag,))  # type: ignore[arg-type]
    with pytest.raises(InvalidStateError, match="of 'c' has not ended"):
        resumes.settle("pause", None, 110.0)
    assert timeouts == [10.0, 6.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: _core.resume_begin("pending", None), TypeError),
        (lambda: _core.pending_wait(object()), TypeError),  # type: ignore[arg-type]
        (lambda: _core.pending_done(None), TypeError),  # type: ignore[arg-type]
        (lambda: _core.Pending(), TypeError),
        (lambda: begin().wait_stream("stream"), InvalidArgumentError),
        (lambda: begin().wait_stream(-1), InvalidArgumentError),
        (lambda: begin().wait_stream(True), InvalidArgumentError),
        (lambda: _core.pending_wait_stream(object(), 0), TypeError),  # type: ignore[arg-type]
        (lambda: _core.pending_wait_stream(_core.resume_begin(None, None), "0"), TypeError),  # type: ignore[arg-type]
        (lambda: _core.pending_wait_stream(_core.resume_begin(None, None), 0, 1), TypeError),  # type: ignore[arg-type]
        (lambda: _core.pending_wait(_core.resume_begin(None, None), 1), TypeError),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_a_pending_resume_is_refused_inside_a_pause(simulator: Any, address: int) -> None:
    begin().wait()
    seen: list[BaseException] = []

    def progress(done: int, total: int) -> None:
        try:
            begin()
        except InvalidStateError as error:
            seen.append(error)

    _core.pause(("pending",), None, progress=progress)
    assert seen
