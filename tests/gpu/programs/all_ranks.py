"""One of several ranks that pause and resume together: python all_ranks.py RANK RANKS FILE SCENARIO...

Each rank checks its own memory and its own error, and prints the scenarios that it has passed. FILE is where rank 0 writes
the port of the store.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
import torch.distributed as dist
from gpu_support import MIB, checksum, fill_random, state_of, take_all_but

from torch_memory_saver import _core, ranks
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.errors import InvalidArgumentError, OutOfMemoryError, RanksError
from torch_memory_saver.ranks import vote

SIZE = 32 * MIB
#: Longer than any rank needs, however slow the machine is.
LONG_S = 100.0
#: For calls that end by their timeout. All ranks that make such a call meet before it, because none may be late.
SHORT_S = 5.0
#: The rank that is short of memory, is late, and is killed first.
OTHER = 2
#: The rank that is killed next. Then only the ranks 0, which has the store, and 1 are left.
NEXT = 3

rank, count, file, scenarios = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]


def join() -> dist.Store:
    """Make the group. Rank 0 has the store, and writes its port."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
    else:
        while not file.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), count, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=LONG_S))
    return store


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def states() -> list[int]:
    return [state_of(tensor) for tensor in tensors.values()]


def expect(state: int, contents: bool = True) -> None:
    assert states() == [state] * len(tensors), (rank, states())
    if state == _core.STATE_ACTIVE and contents:
        assert {name: checksum(tensor) for name, tensor in tensors.items()} == sums


def fails(call: Any, *arguments: Any, **options: Any) -> RanksError:
    try:
        call(*arguments, **options)
    except RanksError as error:
        return error
    raise AssertionError(f"rank {rank}: {call.__name__} has not failed")


def working() -> None:
    for group in (None, dist.new_group(backend="gloo")):
        assert ranks.pause(group=group, timeout=LONG_S).bytes >= 2 * SIZE
        expect(PAUSED)
        assert ranks.resume(["weights", "kv"], group, LONG_S).bytes >= 2 * SIZE
        expect(ACTIVE)
    part = dist.new_group([1, 3], backend="gloo")  # ranks are named by their numbers in the world
    if rank in (1, 3):
        handle = saver.on_pause("kv", "before", refuse if rank == 3 else lambda call: None)
        error = fails(ranks.pause, group=part, timeout=LONG_S)
        handle.remove()
        assert error.failures == {3: "ZeroDivisionError: refused"}, error
        expect(ACTIVE)
    for wrong in ("weights", dist.GroupMember.NON_GROUP_MEMBER):
        try:
            ranks.pause("weights", wrong)
        except InvalidArgumentError as error:
            assert str(error).startswith("group must be None or a process group that this process is a member of, not ")
        else:
            raise AssertionError("a group that is none has been accepted")


def refuse(call: object) -> None:
    raise ZeroDivisionError("refused")


def short_of_memory() -> None:
    """One rank cannot resume: the others pause again what they have resumed, with its contents."""
    ranks.pause(timeout=LONG_S)
    hog = take_all_but(SIZE, device) if rank == OTHER else None
    dist.barrier()
    error = fails(ranks.resume, timeout=2 * SHORT_S)
    expect(PAUSED)
    neighbours = {each for each in range(count) if each % torch.cuda.device_count() == device_of(OTHER)}
    assert error.failures and set(error.failures) <= neighbours, error
    if count <= torch.cuda.device_count():
        assert list(error.failures) == [OTHER]
        assert isinstance(error.__cause__, OutOfMemoryError) == (rank == OTHER)
    assert error.not_undone == ()
    failed = next(iter(error.failures))
    reported = "" if failed == rank else "it reported "
    assert str(error).startswith(f"ranks.resume failed on rank {failed}: {reported}OutOfMemoryError: resume: device ")
    dist.barrier()
    del hog
    torch.cuda.empty_cache()
    dist.barrier()
    ranks.resume(timeout=LONG_S)
    expect(ACTIVE)


def late() -> None:
    """One rank makes the call after the others have given up, so that it joins a call that they do not make."""
    dist.barrier()
    if rank == OTHER:
        store.wait(["given up"], timedelta(seconds=LONG_S))
    error = fails(ranks.pause, timeout=SHORT_S)
    missing = {each for each in range(count) if (each == OTHER) != (rank == OTHER)}
    assert set(error.failures) == missing, error
    assert all("did not make the call" in reason for reason in error.failures.values())
    assert "of the process group '" in str(error) and "ranks.pause of every tag" in str(error), error
    if rank != OTHER:
        store.set("given up", "1")
    expect(ACTIVE)
    next_call_works()


def missed() -> None:
    """One rank leaves a call out, whose contents have no backup."""
    with saver.region(tag="no backup"):
        tensors["no backup"] = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{device}")
    fill_random(tensors["no backup"], 200 + rank)
    sums["no backup"] = checksum(tensors["no backup"])
    dist.barrier()
    if rank != OTHER:
        assert list(fails(ranks.pause, timeout=SHORT_S).failures) == [OTHER]
    expect(ACTIVE)
    del tensors["no backup"], sums["no backup"]
    next_call_works()


def refused() -> None:
    """One rank cannot pause because of a capture. Tags differ between the ranks."""
    capture = _core.capture_begin(None, _core.BACKUP_NONE) if rank == OTHER else 0
    error = fails(ranks.pause, "weights" if rank == OTHER else "kv", timeout=LONG_S)
    assert list(error.failures) == [OTHER] and "CaptureInProgressError" in error.failures[OTHER], error
    assert f"rank {OTHER} made this call, ranks.pause of 'weights', and refused it" in str(error), error
    assert "ranks.pause of 'kv', and agreed to it" in str(error), error
    if rank == OTHER:
        _core.capture_end(capture)
    expect(ACTIVE)
    next_call_works()


def without_room() -> None:
    """One rank has no room on the disk for its backups, which is found before any rank pauses."""
    before = _core.counters()["pauses_total"], _core.counters()["failures_total"]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if rank == OTHER:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    error = fails(ranks.pause, timeout=LONG_S, backup="disk")
    if rank == OTHER:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list(error.failures) == [OTHER] and "BackupIOError" in error.failures[OTHER], error
    assert "Nothing was changed on this rank" in str(error), error
    assert (_core.counters()["pauses_total"], _core.counters()["failures_total"]) == before
    expect(ACTIVE)
    next_call_works()


def interrupted() -> None:
    """A signal interrupts one rank while all but one wait for that one, which comes later."""
    waiting = [f"waits {each}" for each in range(count) if each not in (OTHER, NEXT)]
    if rank == NEXT:
        store.wait(["interrupted"], timedelta(seconds=LONG_S))
    elif rank == OTHER:
        in_each_wait(lambda: interrupt_once() if store.check(waiting) else None)
        try:
            ranks.pause(timeout=LONG_S)
        except KeyboardInterrupt as error:
            assert isinstance(error.__cause__, RanksError)
        else:
            raise AssertionError("the call was not interrupted")
        store.set("interrupted", "1")
    else:
        in_each_wait(lambda: store.set(f"waits {rank}", "1"))
        assert list(fails(ranks.pause, timeout=LONG_S).failures) == [OTHER]
    expect(ACTIVE)
    next_call_works()


def in_each_wait(action: Callable[[], object]) -> None:
    """Carry out an action whenever this rank sleeps because it waits for the others."""
    sleep = vote.Clock.sleep

    def act_and_sleep(clock: vote.Clock) -> None:
        action()
        sleep(clock)

    vote.Clock.sleep = act_and_sleep  # type: ignore[method-assign]


handled = threading.Event()


def interrupt_once() -> None:
    if not handled.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def handle(number: int, frame: object) -> None:
    if not handled.is_set():
        handled.set()
        raise KeyboardInterrupt


signal.signal(signal.SIGUSR1, handle)


def next_call_works() -> None:
    """All ranks are in step."""
    dist.barrier()
    ranks.pause(timeout=LONG_S)
    expect(PAUSED)
    ranks.resume(timeout=LONG_S)
    expect(ACTIVE)


def killed_before() -> None:
    """One rank is killed before it makes the call."""
    ranks.pause(timeout=LONG_S)
    if rank == OTHER:
        die()
    error = fails(ranks.resume, timeout=SHORT_S)
    assert error.failures == {OTHER: f"the rank did not make the call within the timeout of {SHORT_S:g} seconds"}
    assert error.not_undone == ()
    expect(PAUSED)
    saver.resume()
    expect(ACTIVE)


def killed_inside() -> None:
    """One rank is killed during its pause."""
    if rank == NEXT:
        saver.on_pause("kv", "after", lambda call: die())
    dist.barrier(group=first_three)
    error = fails(ranks.pause, group=first_three, timeout=SHORT_S)
    assert error.failures == {NEXT: f"the rank did not end its part of the call within the timeout of {SHORT_S:g} seconds"}
    assert error.not_undone == ()
    expect(ACTIVE)


def store_killed() -> None:
    store_lost(signal.SIGKILL)


def store_stopped() -> None:
    store_lost(signal.SIGSTOP)


def store_lost(how: signal.Signals) -> None:
    """The process that has the store ends, or does not answer any more, while the other waits for the decision."""

    def end(call: object) -> None:
        store.wait(["paused"], timedelta(seconds=LONG_S))
        os.kill(os.getpid(), how)

    if rank == 0:
        saver.on_pause("kv", "before", end)
    else:
        saver.on_pause("kv", "after", lambda call: store.set("paused", "1"))
    dist.barrier(group=last_two)
    error = fails(ranks.pause, group=last_two, timeout=SHORT_S)
    assert error.failures == {}
    assert "the store of the process group is lost" in str(error)
    assert "has undone its part: 'kv', 'weights'" in str(error)
    expect(ACTIVE)


def device_of(each: int) -> int:
    return each % torch.cuda.device_count()


ACTIVE, PAUSED = _core.STATE_ACTIVE, _core.STATE_PAUSED
device = device_of(rank)
torch.cuda.set_device(device)
store = join()
tensors = {}
for name, seed in (("kv", rank), ("weights", 100 + rank)):
    with saver.region(tag=name, backup="host"):
        tensors[name] = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{device}")
    fill_random(tensors[name], seed)
sums = {name: checksum(tensor) for name, tensor in tensors.items()}
first_three = dist.new_group([0, 1, NEXT], backend="gloo") if count > NEXT else None
last_two = dist.new_group([0, 1], backend="gloo")
dist.barrier()
for scenario in scenarios:
    globals()[scenario]()
    print(scenario, flush=True)
os._exit(0)  # the group cannot be destroyed together once a rank has been killed
