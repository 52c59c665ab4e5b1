"""Guards signals during pause and resume, and resume(timeout=, exclusive=): each in a fresh process, whose main thread gets
the signals."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: One allocation with contents on the simulated GPU, and, for `hold`, work on it that ends when gate 1 is opened.
PRELUDE = """
import ctypes, math, os, signal, subprocess, sys, threading, time
from torch_memory_saver import _core, errors, torch_memory_saver
MIB = 1 << 20
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
simulator.tms_sim_take_memory.argtypes = (ctypes.c_int, ctypes.c_int64)
simulator.tms_sim_calls.restype = ctypes.c_uint64

def allocate(size, pattern=7, backup=_core.BACKUP_PINNED, tag="a"):
    level = _core.region_enter(tag, backup, True)
    address = _core.allocate(size, 0)
    _core.region_leave(level)
    ctypes.memset(address, pattern, size)
    return address

def hold(address):
    context = ctypes.c_void_p()
    assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert simulator.cuCtxPushCurrent_v2(context) == 0
    assert simulator.tms_sim_launch_add(None, address, MIB, 1, 1) == 0

def when_waiting(function):
    def watch():
        simulator.tms_sim_wait_until_synchronizing()
        function()
    threading.Thread(target=watch, daemon=True).start()

def when_out_of_memory(function):
    simulator.tms_sim_clear_counts()
    def watch():
        while simulator.tms_sim_calls(b"cuMemGetInfo") == 0:
            time.sleep(0)
        function()
    threading.Thread(target=watch, daemon=True).start()

def state(address):
    return _core.find(address).state
"""

Program = Callable[..., Any]

_numbers = itertools.count()


def shared_name() -> str:
    """For processes that share one simulated machine; each test has a different one."""
    return f"tms-test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def plain(program: Program) -> Program:
    """Runs a program after the prelude, with nothing preloaded, on a device of 64 MiB."""

    def run(text: str, **variables: str) -> str:
        return str(program(PRELUDE + text, preloaded=False, TMS_SIMULATED_MEMORY="64MiB", **variables).stdout)

    return run


# Ctrl-C.


def test_ctrl_c_while_pause_waits_for_the_gpu(plain: Program) -> None:
    output = plain("""
address = allocate(2 * MIB)
hold(address)
when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    torch_memory_saver.pause()
except KeyboardInterrupt as error:
    print("interrupted", type(error).__name__)
print(state(address) == _core.STATE_ACTIVE, _core.counters()["host_backup_bytes"], _core.in_transition())
simulator.tms_sim_open_gate(1)
print(torch_memory_saver.pause().allocations, torch_memory_saver.resume().allocations)
data = ctypes.string_at(address, 2 * MIB)
print(data == bytes([8]) * MIB + bytes([7]) * MIB)
""")
    assert output.splitlines() == ["interrupted KeyboardInterrupt", "True 0 False", "1 1", "True"]


def test_ctrl_c_while_resume_waits_for_memory(plain: Program) -> None:
    output = plain("""
address = allocate(36 * MIB)
torch_memory_saver.pause()
assert simulator.tms_sim_take_memory(0, 50 * MIB) == 0
when_out_of_memory(lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    torch_memory_saver.resume(timeout=math.inf)
except KeyboardInterrupt:
    print("interrupted")
print(state(address) == _core.STATE_PAUSED)
assert simulator.tms_sim_take_memory(0, -50 * MIB) == 0
torch_memory_saver.resume()
print(ctypes.string_at(address, MIB) == bytes([7]) * MIB)
""")
    assert output.splitlines() == ["interrupted", "True", "True"]


def test_ctrl_c_during_another_thread_s_pause_is_the_main_thread_s(plain: Program) -> None:
    """The call of another thread continues; its waiting main thread is interrupted as usual."""
    output = plain("""
address = allocate(2 * MIB)
hold(address)
paused = threading.Event()
thread = threading.Thread(target=lambda: (torch_memory_saver.pause(), paused.set()), daemon=True)
when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    thread.start()
    while not paused.wait(0.05):  # A signal that comes just before a lock is waited for does not end that wait.
        pass
except KeyboardInterrupt:
    print("interrupted", state(address) == _core.STATE_PAUSING)
simulator.tms_sim_open_gate(1)
paused.wait()
print(state(address) == _core.STATE_PAUSED)
""")
    assert output.splitlines() == ["interrupted True", "True"]


def test_ctrl_c_while_waiting_for_another_thread_s_call(plain: Program) -> None:
    output = plain("""
held, mine = allocate(2 * MIB, tag="held"), allocate(2 * MIB, tag="mine")
hold(held)
thread = threading.Thread(target=torch_memory_saver.pause, args=("held",))
thread.start()
simulator.tms_sim_wait_until_synchronizing()
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    torch_memory_saver.pause("mine")
except KeyboardInterrupt:
    print("interrupted", state(mine) == _core.STATE_ACTIVE, state(held) == _core.STATE_PAUSING)
simulator.tms_sim_open_gate(1)
thread.join()
print(torch_memory_saver.pause("mine").allocations)
""")
    assert output.splitlines() == ["interrupted True True", "1"]


# Handlers that return.


def test_a_handler_that_returns_ends_nothing(plain: Program) -> None:
    output = plain("""
address = allocate(2 * MIB)
hold(address)
def handler(number, frame):
    print("handler", threading.current_thread() is threading.main_thread(), _core.in_transition())
    simulator.tms_sim_open_gate(1)
signal.signal(signal.SIGUSR1, handler)
when_waiting(lambda: os.kill(os.getpid(), signal.SIGUSR1))
print(torch_memory_saver.pause().allocations, state(address) == _core.STATE_PAUSED)
""")
    assert output.splitlines() == ["handler True True", "1 True"]


def test_calls_from_a_handler_are_refused(plain: Program) -> None:
    output = plain("""
address = allocate(2 * MIB)
hold(address)
class Finalised:
    def __del__(self):
        try:
            torch_memory_saver.pause()
        except errors.InvalidStateError as error:
            print("finaliser", error.operation)
def handler(number, frame):
    for call in (torch_memory_saver.pause, torch_memory_saver.resume, lambda: _core.pause(None, None)):
        try:
            call()
        except errors.InvalidStateError as error:
            print(error.operation, "signal handlers" in str(error))
    Finalised()
    simulator.tms_sim_open_gate(1)
signal.signal(signal.SIGUSR1, handler)
when_waiting(lambda: os.kill(os.getpid(), signal.SIGUSR1))
print(torch_memory_saver.pause().allocations)
print(torch_memory_saver.resume().allocations)
""")
    assert output.splitlines() == ["pause True", "resume True", "pause True", "finaliser pause", "1", "1"]


def test_a_handler_may_exit(plain: Program, program: Program) -> None:
    done = program(
        PRELUDE
        + """
address = allocate(2 * MIB)
hold(address)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
when_waiting(lambda: os.kill(os.getpid(), signal.SIGTERM))
torch_memory_saver.pause()
""",
        preloaded=False,
        status=3,
    )
    assert done.stderr == ""


# Waiting for memory.


def test_resume_waits_for_memory_that_another_thread_releases(plain: Program) -> None:
    output = plain("""
address = allocate(36 * MIB)
torch_memory_saver.pause()
assert simulator.tms_sim_take_memory(0, 50 * MIB) == 0
when_out_of_memory(lambda: simulator.tms_sim_take_memory(0, -50 * MIB))
print(torch_memory_saver.resume("a", timeout=60).allocations)
print(ctypes.string_at(address, 36 * MIB) == bytes([7]) * (36 * MIB))
""")
    assert output.splitlines() == ["1", "True"]


def test_the_timeout_message_names_what_is_missing(plain: Program) -> None:
    output = plain("""
allocate(36 * MIB)
torch_memory_saver.pause()
assert simulator.tms_sim_take_memory(0, 50 * MIB) == 0
for timeout in (None, 0.01):
    try:
        torch_memory_saver.resume(timeout=timeout)
    except errors.OutOfMemoryError as error:
        print(str(error).splitlines()[0])
""")
    sizes = "resume: device 0 needs 36.0 MiB and has 14.0 MiB free: 22.0 MiB are missing"
    holder = "The largest holder of device 0 is other processes, context and modules: 50 MiB of 64 MiB."
    at_once, after_waiting = output.splitlines()
    assert at_once == f"{sizes}. {holder}"
    assert re.sub(r"[0-9.]+ seconds", "T seconds", after_waiting) == f"{sizes} after T seconds. {holder}"


#: The other process: it takes 50 of the 64 MiB that both share, reports it, and releases them on request.
OTHER = """
address = allocate(50 * MIB, backup=_core.BACKUP_NONE)
print("taken", flush=True)
sys.stdin.readline()
torch_memory_saver.pause()
print("given back", flush=True)
sys.stdin.readline()
"""


def test_resume_waits_for_another_process(plain: Program, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(PRELUDE + OTHER)
    output = plain(
        f"""
address = allocate(36 * MIB)
torch_memory_saver.pause()
other = subprocess.Popen([sys.executable, {str(other)!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(other.stdout.readline().strip())
try:
    torch_memory_saver.resume()
except errors.OutOfMemoryError as error:
    print("missing" in str(error))
def give_back():
    other.stdin.write("now\\n")
    other.stdin.flush()
when_out_of_memory(give_back)
print(torch_memory_saver.resume(timeout=60).allocations, ctypes.string_at(address, MIB) == bytes([7]) * MIB)
print(other.stdout.readline().strip())
other.communicate("end\\n")
print(other.returncode)
""",
        TMS_SIMULATED_SHARED=shared_name(),
    )
    assert output.splitlines() == ["taken", "True", "1 True", "given back", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("exclusive", [False, True])
def test_two_processes_in_opposite_phase(plain: Program, tmp_path: Path, exclusive: bool) -> None:
    """Each needs three quarters of the device, in three pieces, so that both can hold a part of it at once."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        PRELUDE
        + f"""
pattern = int(sys.argv[1])
sys.stdin.readline()
pieces = []
while len(pieces) < 3:
    try:
        pieces.append(allocate(16 * MIB, pattern, _core.BACKUP_MMAP))
    except errors.OutOfMemoryError:
        torch_memory_saver.pause()
torch_memory_saver.pause()
for cycle in range(10):
    torch_memory_saver.resume(timeout=100, exclusive={exclusive})
    for piece in pieces:
        assert ctypes.string_at(piece, 16 * MIB) == bytes([pattern]) * (16 * MIB)
    torch_memory_saver.pause()
print("done", flush=True)
"""
    )
    output = plain(
        f"""
workers = [
    subprocess.Popen([sys.executable, {str(worker)!r}, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for n in (1, 2)
]
for worker in workers:
    worker.stdin.write("go\\n")
    worker.stdin.flush()
for worker in workers:
    print(worker.communicate()[0].strip(), worker.returncode)
""",
        TMS_SIMULATED_SHARED=shared_name(),
        TMS_LOCK_DIR=str(tmp_path / "locks"),
    )
    assert output.splitlines() == ["done 0", "done 0"]


#: Holds the lock of device 0 until it is killed.
HOLDER = """
address = allocate(2 * MIB)
torch_memory_saver.pause()
torch_memory_saver.resume(exclusive=True)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_the_lock_of_a_process_that_is_killed_is_free(plain: Program, tmp_path: Path) -> None:
    holder = tmp_path / "holder.py"
    holder.write_text(PRELUDE + HOLDER)
    output = plain(
        f"""
address = allocate(2 * MIB)
torch_memory_saver.pause()
holder = subprocess.Popen([sys.executable, {str(holder)!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(holder.stdout.readline().strip())
try:
    torch_memory_saver.resume(exclusive=True)
except errors.DeviceLockedError:
    print("refused", state(address) == _core.STATE_PAUSED)
threading.Timer(0.1, holder.kill).start()
print(torch_memory_saver.resume(exclusive=True, timeout=60).allocations)
print(ctypes.string_at(address, MIB) == bytes([7]) * MIB)
holder.wait()
""",
        TMS_LOCK_DIR=str(tmp_path / "locks"),
    )
    assert output.splitlines() == ["locked", "refused True", "1", "True"]
