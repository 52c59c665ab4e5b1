"""Guards hooks with several threads, forked children, and signals."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from processes import Program, wait_until
from recorded_hooks import SIZE, TIMEOUT_S, Gate, Recorder

from torch_memory_saver._engine.calls import call_turns


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows whenever a call begins to wait for its turn."""
    waits: list[None] = []
    take = call_turns.CallTurn._take

    def counted(turn: call_turns.CallTurn) -> bool:
        taken = take(turn)
        if not taken:
            waits.append(None)
        return taken

    monkeypatch.setattr(call_turns.CallTurn, "_take", counted)
    return waits


# -- turns ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", ["before", "after"])
def test_two_pauses_of_a_tag_call_the_callbacks_once(
    hooks: Recorder, pool: ThreadPoolExecutor, turns: list[None], callback: str
) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    gate = hooks.does["p", callback] = Gate()
    first = pool.submit(hooks.saver.pause, hooks.tag("a"))
    assert gate.reached.wait(TIMEOUT_S)
    second = pool.submit(hooks.saver.pause)
    wait_until(lambda: bool(turns))
    gate.opened.set()
    assert {first.result(TIMEOUT_S).allocations, second.result(TIMEOUT_S).allocations} == {0, 1}
    assert hooks.take_events() == ["p before", "p after"]


def test_a_resume_waits_for_the_pause_and_has_its_callbacks(
    hooks: Recorder, pool: ThreadPoolExecutor, turns: list[None]
) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    hooks.on_resume("r")
    gate = hooks.does["p", "before"] = Gate()
    pause = pool.submit(hooks.saver.pause, hooks.tag("a"))
    assert gate.reached.wait(TIMEOUT_S)
    resume = pool.submit(hooks.saver.resume, [hooks.tag("b"), hooks.tag("a")])
    wait_until(lambda: bool(turns))
    gate.opened.set()
    assert (pause.result(TIMEOUT_S).allocations, resume.result(TIMEOUT_S).allocations) == (1, 1)
    assert hooks.take_events() == ["p before", "p after", "r before", "r after"]


def test_ranks_on_threads_may_wait_for_each_other_in_callbacks(hooks: Recorder, pool: ThreadPoolExecutor) -> None:
    """As a collective call does, where each thread has a tag of its own."""
    hooks.allocate("rank0", "rank1")
    barrier = threading.Barrier(2)
    hooks.keep(hooks.saver.on_pause(None, "before", lambda call: barrier.wait(TIMEOUT_S)))
    pauses = [pool.submit(hooks.saver.pause, hooks.tag(f"rank{rank}")) for rank in range(2)]
    assert [pause.result(TIMEOUT_S).allocations for pause in pauses] == [1, 1]


def test_a_failed_call_gives_its_turn_back(hooks: Recorder, pool: ThreadPoolExecutor) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    hooks.raises["p", "before"] = KeyError("no")
    with pytest.raises(KeyError):
        hooks.saver.pause()
    hooks.raises.clear()
    assert pool.submit(hooks.saver.pause).result(TIMEOUT_S).allocations == 1
    assert call_turns._running == []


def test_a_resume_that_waits_for_memory_lets_others_pause(hooks: Recorder, pool: ThreadPoolExecutor, simulator: Any) -> None:
    """The pause of another thread is what it waits for, and selects every tag."""
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.allocate("b")
    simulator.take_memory(simulator.device_memory - SIZE)
    try:
        hooks.on_resume("r")
        hooks.on_pause("p", hooks.tag("b"))
        resume: Future[Any] = pool.submit(hooks.saver.resume, hooks.tag("a"), timeout=TIMEOUT_S)
        wait_until(lambda: ("r", "before") in hooks.events)
        assert pool.submit(hooks.saver.pause).result(TIMEOUT_S).allocations == 1
        assert resume.result(TIMEOUT_S).allocations == 1
    finally:
        simulator.take_memory(SIZE - simulator.device_memory)
    assert sorted(hooks.take_events()) == ["p after", "p before", "r after", "r before"]


# -- asyncio -------------------------------------------------------------------------------------------------------------


def test_callbacks_run_on_the_thread_of_the_call(hooks: Recorder) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    threads: list[int] = []
    for callback in ("before", "after"):
        hooks.does["p", callback] = lambda: threads.append(threading.get_ident())

    async def main() -> int:
        return await asyncio.to_thread(lambda: (hooks.saver.pause(), threading.get_ident())[1])

    assert [asyncio.run(main())] * 2 == threads
    assert threading.get_ident() not in threads


# -- fork ----------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading
from torch_memory_saver import _core, errors, torch_memory_saver as saver
calls = []
saver.on_pause(None, "before", lambda call: calls.append(call.operation))

def allocate():
    level = _core.region_enter("a", _core.BACKUP_NONE, True)
    _core.allocate(2 << 20, 0)
    _core.region_leave(level)

def in_child(function):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_forked_child_inherits_hooks(program: Program) -> None:
    program(
        FORK
        + """
def child():
    allocate()
    saver.pause()
    assert calls == ["pause"], calls
in_child(child)
assert calls == []
""",
        preloaded=False,
    )


def test_the_child_of_a_process_with_memory_calls_no_hook(program: Program) -> None:
    """Its pause is refused. A call that was under way in the parent is no call of the child's."""
    program(
        FORK
        + """
allocate()
inside, leave = threading.Event(), threading.Event()
def hold(call):
    inside.set()
    leave.wait(60)
handle = saver.on_pause(None, "before", hold)
thread = threading.Thread(target=saver.pause)
thread.start()
inside.wait(60)
handle.remove()
calls.clear()
def child():
    try:
        saver.pause()
    except errors.ForkedProcessError as error:
        assert error.operation == "pause", error
        assert calls == [], calls
    else:
        raise AssertionError("a forked child has paused")
in_child(child)
leave.set()
thread.join()
""",
        preloaded=False,
    )


def test_a_forked_child_calls_no_callback_of_its_parents_resume(program: Program) -> None:
    program(
        FORK
        + """
allocate()
saver.pause()
saver.on_resume(None, "after", lambda call: calls.append("after"))
saver.on_resume(None, "before", lambda call: None, cancelled=lambda error: calls.append("cancelled"))
pending = saver.resume(wait=False)
calls.clear()
def child():
    try:
        pending.wait()
    except errors.ForkedProcessError:
        assert calls == [], calls
    else:
        raise AssertionError("a forked child has waited for its parent's resume")
in_child(child)
pending.wait()
assert calls == ["after"], calls
""",
        preloaded=False,
    )


# -- signals -------------------------------------------------------------------------------------------------------------

INTERRUPT = """
import ctypes, os, signal, threading
from torch_memory_saver import _core, torch_memory_saver as saver
MIB = 1 << 20
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
level = _core.region_enter("a", _core.BACKUP_PINNED, True)
address = _core.allocate(2 * MIB, 0)
_core.region_leave(level)
events = []
saver.on_pause(None, "before", lambda call: events.append("before"), cancelled=lambda error: events.append(type(error)))
"""


def test_ctrl_c_while_the_operation_waits(program: Program) -> None:
    program(
        INTERRUPT
        + """
context = ctypes.c_void_p()
assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert simulator.cuCtxPushCurrent_v2(context) == 0
assert simulator.tms_sim_launch_add(None, address, MIB, 1, 1) == 0
def watch():
    simulator.tms_sim_wait_until_synchronizing()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=watch, daemon=True).start()
try:
    saver.pause()
except KeyboardInterrupt:
    events.append("raised")
assert events == ["before", KeyboardInterrupt, "raised"], events
assert _core.find(address).state == _core.STATE_ACTIVE
simulator.tms_sim_open_gate(1)
saver.pause()
assert events[3:] == ["before"], events
""",
        preloaded=False,
    )


def test_ctrl_c_while_waiting_for_a_turn(program: Program) -> None:
    """No hook is called, and the next pause has its turn."""
    program(
        INTERRUPT
        + """
inside, leave = threading.Event(), threading.Event()
def hold(call):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        leave.wait(60)
saver.on_pause(None, "before", hold)
thread = threading.Thread(target=saver.pause)
thread.start()
inside.wait(60)
events.clear()
from torch_memory_saver._engine.calls.call_turns import CallTurn
take = CallTurn._take
def interrupted(turn):
    CallTurn._take = take
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    return take(turn)
CallTurn._take = interrupted
def handler(number, frame):
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
try:
    saver.pause()
except KeyboardInterrupt:
    events.append("raised")
assert events == ["raised"], events
leave.set()
thread.join()
saver.resume()
saver.pause()
assert events == ["raised", "before"], events
""",
        preloaded=False,
    )
