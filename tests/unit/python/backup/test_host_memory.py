"""Guards the policy for backups in host memory, as set by the environment and by the program, in fresh processes on the
simulated GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from core_regions import core_region
from processes import Program

from torch_memory_saver import _core, errors
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20

#: Waits for the library's background work.
WAIT = """
import time
def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, torch_memory_saver.stats()
        time.sleep(0.001)
def resident():
    return torch_memory_saver.stats().host_resident_bytes
def pooled():
    return torch_memory_saver.stats().host_pooled_bytes
def allocate(size, value, **settings):
    with torch_memory_saver.region("a", enable_cpu_backup=True, **settings):
        address = cuda_malloc(size)
    fill(address, size, value)
    return address
"""


# Settings of the environment.


@pytest.mark.parametrize("policy", ["release", "pool", "retain"])
def test_the_environment_sets_the_policy(program: Program, policy: str) -> None:
    text = f"""
assert torch_memory_saver.host_memory == "{policy}"
assert torch_memory_saver.retain_cpu_backup is {policy == "retain"}
address = allocate(8 * MIB, 5)
torch_memory_saver.pause()
torch_memory_saver.resume()
assert read(address, 8 * MIB) == bytes([5]) * 8 * MIB
wait_for(lambda: (pooled() >= MIB, resident() > 0) == ({policy == "pool"}, {policy != "release"}))  # fingerprints: less
assert (_core.host_backup(address, MIB) is not None) is {policy == "retain"}
"""
    program(WAIT + text, TMS_HOST_MEMORY=policy)


def test_the_older_variable_means_retain(program: Program) -> None:
    program('assert torch_memory_saver.host_memory == "retain"', TMS_RETAIN_CPU_BACKUP="1")


def test_an_unknown_policy_is_reported_and_ignored(program: Program) -> None:
    done = program('assert torch_memory_saver.host_memory == "release"', TMS_HOST_MEMORY="Pool!")
    assert done.stderr.count("TMS_HOST_MEMORY") == 1
    assert "Pool!" in done.stderr


def test_a_backup_beyond_the_limit_changes_nothing(program: Program) -> None:
    text = """
from torch_memory_saver.errors import OutOfHostMemoryError
address = allocate(50 * MIB, 5)
free = free_bytes()
for _ in range(2):
    try:
        torch_memory_saver.pause()
    except OutOfHostMemoryError as error:
        assert "TMS_HOST_MEMORY_LIMIT_MB" in str(error), error
    else:
        raise AssertionError
    wait_for(lambda: resident() == 0)
    assert free_bytes() == free
    assert torch_memory_saver.stats().tags["a"].resident_bytes == 50 * MIB
assert read(address, 50 * MIB) == bytes([5]) * 50 * MIB
try:
    torch_memory_saver.reserve_host_memory(50 * MIB)
except OutOfHostMemoryError as error:
    assert "TMS_HOST_MEMORY_LIMIT_MB" in str(error), error
else:
    raise AssertionError
assert (pooled(), resident()) == (0, 0)
assert torch_memory_saver.pause(backup="discard").copied_bytes == 0
torch_memory_saver.resume(zero=True)
assert read(address, 50 * MIB) == bytes(50 * MIB)
"""
    program(WAIT + text, TMS_HOST_MEMORY_LIMIT_MB="32")


def test_the_pool_keeps_to_its_limit(program: Program) -> None:
    text = """
address = allocate(75 * MIB, 5, host_memory="pool")
torch_memory_saver.pause()
torch_memory_saver.resume()
wait_for(lambda: resident() <= 32 * MIB)
assert pooled() <= 32 * MIB
assert read(address, 75 * MIB) == bytes([5]) * 75 * MIB
torch_memory_saver.reserve_host_memory(48 * MIB)
wait_for(lambda: pooled() >= 48 * MIB)
"""
    program(WAIT + text, TMS_HOST_POOL_LIMIT_MB="32")


# Settings of the program.


def test_a_reservation_is_used_by_the_next_pause(program: Program) -> None:
    text = """
address = allocate(25 * MIB, 5)
torch_memory_saver.reserve_host_memory(32 * MIB, device=0)
wait_for(lambda: pooled() >= 32 * MIB)
before = resident()
torch_memory_saver.pause()
assert resident() == before
assert pooled() < before
torch_memory_saver.resume(host_memory="pool")
assert read(address, 25 * MIB) == bytes([5]) * 25 * MIB
wait_for(lambda: pooled() == resident() == before)
"""
    program(WAIT + text)


def test_the_pool_is_emptied_on_request(program: Program) -> None:
    text = """
torch_memory_saver.release_host_memory()  # there is none
address = allocate(25 * MIB, 5)
torch_memory_saver.reserve_host_memory(128 * MIB, device=0)
wait_for(lambda: pooled() >= 128 * MIB)
torch_memory_saver.pause()
torch_memory_saver.release_host_memory()
wait_for(lambda: pooled() == 0 and resident() < 128 * MIB)
assert resident() >= 25 * MIB, "the backup"
torch_memory_saver.resume(host_memory="pool")
assert read(address, 25 * MIB) == bytes([5]) * 25 * MIB
assert pooled() >= 25 * MIB, "the limit has stayed"
torch_memory_saver.release_host_memory()
wait_for(lambda: (pooled(), resident()) == (0, 0))
"""
    program(WAIT + text)


def test_a_view_keeps_its_memory_after_the_resume(program: Program) -> None:
    """The pool is the last, because its memory stays."""
    text = """
for policy in ("release", "retain", "pool"):
    address = allocate(16 * MIB, 5, host_memory=policy)
    torch_memory_saver.pause()
    view = _core.host_backup(address, 16 * MIB)
    torch_memory_saver.resume()
    held, page = 16 * MIB, 4096 if policy == "retain" else 0 # of the fingerprints
    wait_for(lambda: (pooled(), resident()) == (page, held + page))
    if policy != "retain":
        fill(address, 16 * MIB, 6)
        torch_memory_saver.pause()
        torch_memory_saver.resume(host_memory="release")
    assert ctypes.string_at(view.address, 16 * MIB) == bytes([5]) * 16 * MIB
    del view
    expected = {"release": (0, 0), "pool": (held, held), "retain": (page, held + page)}
    wait_for(lambda: (pooled(), resident()) == expected[policy])
    cuda_free(address)
    torch_memory_saver.release_host_memory()
    wait_for(lambda: (pooled(), resident()) == (0, 0))
"""
    program(WAIT + text)


def test_a_failed_pause_leaves_a_retained_copy_at_its_address(simulator: Any) -> None:
    """With its contents where nothing had been copied, else without; a view stays valid in any case."""
    with core_region("retained", _core.BACKUP_PINNED, True, _core.HOST_RETAIN):
        address = _core.allocate(MIB, 0)
    simulator.write(address, b"1" * MIB)
    _core.pause(None, None)
    _core.resume(None, None)
    view = _core.host_backup(address, MIB)
    assert view is not None
    simulator.write(address, b"2" * MIB)
    # The first wait is for the comparison with what the copy holds.
    for call, before, contents in (("cuMemcpyDtoHAsync", 0, b"1" * MIB), ("cuStreamSynchronize", 1, None)):
        simulator.fail_after(call, before, 1, 999)
        with pytest.raises(errors.DriverError):
            _core.pause(None, None)
        kept = _core.host_backup(address, MIB)
        assert (kept is None) == (contents is None)
        if kept is not None:
            assert kept.address == view.address
            assert ctypes.string_at(kept.address, MIB) == contents
    _core.pause(None, None)
    renewed = _core.host_backup(address, MIB)
    assert renewed is not None and renewed.address == view.address
    assert ctypes.string_at(view.address, MIB) == b"2" * MIB
    _core.free(address)


def test_absurd_reservations_change_nothing(saver: TorchMemorySaver, simulator: Any) -> None:
    before = saver.stats()
    for size, device in ((-1, None), (1 << 63, None), (1.5, None), (MIB, 2), (MIB, -1), (MIB, "cuda:0"), (True, None)):
        with pytest.raises(errors.InvalidArgumentError):
            saver.reserve_host_memory(size, device)  # type: ignore[arg-type,unused-ignore]
    for size in (1 << 50, (1 << 63) - 1):
        with pytest.raises(errors.OutOfHostMemoryError):
            saver.reserve_host_memory(size, 0)
    assert saver.stats().host_resident_bytes == before.host_resident_bytes


def test_the_policy_of_the_process(saver: TorchMemorySaver, simulator: Any) -> None:
    assert saver.host_memory == "release"
    for policy in ("pool", "retain", "release"):
        saver.host_memory = policy
        assert saver.host_memory == policy
        assert saver.retain_cpu_backup is (policy == "retain")
    for wrong in ("", "keep", None, 2):
        with pytest.raises(errors.InvalidArgumentError, match="host_memory"):
            saver.host_memory = wrong  # type: ignore[assignment]
    assert saver.host_memory == "release"


def test_bad_choices_are_refused_before_anything_changes(saver: TorchMemorySaver, simulator: Any) -> None:
    with core_region("a", _core.BACKUP_PINNED, True):
        _core.allocate(2 * MIB, 0)
    for call in (
        lambda: saver.region("a", host_memory="keep"),
        lambda: saver.cuda_graph(None, host_memory="keep"),
        lambda: saver.pause("a", backup="tape"),
        lambda: saver.pause("a", progress="bar"),  # type: ignore[arg-type]
        lambda: saver.resume("a", host_memory="keep"),
        lambda: saver.resume("a", progress=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.InvalidArgumentError):
            call()
    assert saver.stats().tags["a"].resident_bytes == 2 * MIB
    assert _core.region_current().depth == 0


def test_keywords_that_were_not_given_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another implementation in place of ours need not know them."""
    given: list[tuple[str, dict[str, Any]]] = []

    class Theirs:
        def __getattr__(self, name: str) -> Any:
            return lambda **keywords: given.append((name, keywords))

    saver = TorchMemorySaver()
    saver._impl = Theirs()
    saver.region("a", enable_cpu_backup=True)
    saver.pause("a", backup=None, live_only=True, progress=None)
    saver.resume("a", host_memory=None, zero=False, progress=None)
    saver.pause("a", backup="disk", live_only=False, progress=print)
    saver.resume("a", host_memory="pool", zero=True, progress=print)
    saver.region("a", host_memory="retain")
    assert given == [
        ("region", {"tag": "a", "enable_cpu_backup": True}),
        ("pause", {"tag": "a"}),
        ("resume", {"tag": "a"}),
        ("pause", {"tag": "a", "backup": "disk", "live_only": False, "progress": print}),
        ("resume", {"tag": "a", "host_memory": "pool", "zero": True, "progress": print}),
        ("region", {"tag": "a", "enable_cpu_backup": False, "host_memory": "retain"}),
    ]


# The end of the program.


def test_the_core_is_closed_at_exit_once_it_was_used(program: Program) -> None:
    text = """
_core.close = lambda: print("closed")
"""
    assert program(text).stdout == ""
    assert program(text + "torch_memory_saver.stats()\ntorch_memory_saver.pause()\n").stdout == "closed\n"


def test_the_end_of_a_sub_interpreter_ends_nothing(program: Program) -> None:
    text = """
try:
    import _interpreters as interpreters # Python 3.13 and later.
except ImportError:
    import _xxsubinterpreters as interpreters
    create, run = lambda: interpreters.create(isolated=False), interpreters.run_string
else:
    create, run = lambda: interpreters.create("legacy"), interpreters.exec
address = allocate(4 * MIB, 5)
other = create()
failure = run(other, f"import sys; sys.path[:] = {sys.path}\\n" + '''
from torch_memory_saver import _core, torch_memory_saver
torch_memory_saver.pause()
torch_memory_saver.resume()
print(_core.main_interpreter)
sys.stdout.flush()
''')
assert failure is None, failure
interpreters.destroy(other)
torch_memory_saver.pause()
torch_memory_saver.resume()
assert read(address, 4 * MIB) == bytes([5]) * 4 * MIB
print(_core.main_interpreter)
"""
    assert program(WAIT + text).stdout == "False\nTrue\n"


def test_closing_twice_and_using_it_afterwards(program: Program) -> None:
    """The end of the program still works: contents are restored, and nothing is lost for lack of threads."""
    text = """
from torch_memory_saver.errors import InvalidStateError
address = allocate(64 * MIB, 5)
torch_memory_saver.pause()
_core.close()
_core.close()
torch_memory_saver.resume()
assert read(address, 64 * MIB) == bytes([5]) * 64 * MIB
try:
    torch_memory_saver.pause()
except InvalidStateError as error:
    assert "the process is exiting" in str(error), error
    assert torch_memory_saver.stats().tags["a"].resident_bytes == 64 * MIB
else:
    torch_memory_saver.resume()
assert read(address, 64 * MIB) == bytes([5]) * 64 * MIB
assert torch_memory_saver.pause(backup="discard").allocations == 1
torch_memory_saver.resume()
"""
    assert program(WAIT + text).stderr == ""


@pytest.mark.parametrize("last", ["reserve_host_memory(192 * MIB)", "pause()", "resume()"])
def test_exit_while_memory_is_prepared_or_released(program: Program, last: str) -> None:
    text = f"""
address = allocate(192 * MIB, 5)
if "{last}" == "resume()":
    torch_memory_saver.pause()
torch_memory_saver.{last}
"""
    assert program(WAIT + text).stderr == ""


def test_a_forked_child_closes_nothing_of_its_parents(program: Program) -> None:
    text = """
address = allocate(64 * MIB, 5)
torch_memory_saver.pause()
torch_memory_saver.reserve_host_memory(128 * MIB)
child = os.fork()
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
torch_memory_saver.resume()
assert read(address, 64 * MIB) == bytes([5]) * 64 * MIB
"""
    assert program(WAIT + text).stderr == ""


def test_a_forked_child_inherits_copies_of_a_backup_and_not_its_memory(program: Program) -> None:
    text = """
import signal
address = allocate(2 * MIB, 5)
torch_memory_saver.pause()
backup = _core.host_backup(address, 2 * MIB)
copy = ctypes.string_at(backup.address, 2 * MIB)
def status_of_child(memory):
    child = os.fork()
    if not child:
        os._exit(0 if ctypes.string_at(memory, 2 * MIB) == bytes([5]) * 2 * MIB else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status_of_child(copy) == 0
assert status_of_child(backup.address) == -signal.SIGSEGV
assert ctypes.string_at(backup.address, 2 * MIB) == copy
"""
    program(WAIT + text)
