"""Nothing lost, nobody killed: memory that another process holds, turns, signals, captures, lost devices, killed processes,
damaged files, and random operations. What each leaves is looked at: states, bytes, contents."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_support import (
    LARGE,
    MIB,
    RANDOM_OPERATIONS,
    SIMULATED,
    SPIN_CYCLES,
    STARTED_PRELOADED,
    Program,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    hold_stream,
    run_programs,
    saver,
    state_of,
    take_all_but,
    tms,
    torch,
    write_and_check,
)
from random_operations import Operations
from second_process import SecondProcess
from waiting import while_waiting

#: Seconds for a wait that has to end well; a test that needs them all has failed.
PATIENCE_S = 60
ROUNDS = 5 if SIMULATED else 20
#: Enough for one of two_processes(), not for both.
ENOUGH_FOR_ONE = LARGE * 3 // 2


def weights_and_cache() -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """Memory of twice LARGE, half of it with a backup (tag weights) and half without (kv_cache); the sums of the former."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [empty(LARGE // 2) for _ in range(2)]
    with saver.region(tag="kv_cache"):
        tensors.append(empty(LARGE))
    for seed, tensor in enumerate(tensors[:2]):
        fill_random(tensor, seed)
    return tensors, [checksum(tensor) for tensor in tensors[:2]]


def states(tensors: list[torch.Tensor]) -> set[int]:
    return {state_of(tensor) for tensor in tensors}


def assert_all_there(tensors: list[torch.Tensor], sums: list[tuple[int, int, int]]) -> None:
    assert states(tensors) == {core.STATE_ACTIVE}
    assert [checksum(tensor) for tensor in tensors[: len(sums)]] == sums
    for tensor in tensors[len(sums) :]:
        write_and_check(tensor, 0x77)


# -- memory that another process holds ---------------------------------------------------------------------------------


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
            found = re.search(r"In all device 0 needs (.+?), has (.+?) free, and (.+?) are missing", message)
            assert found, message
            needed, free_then, missing = (int(text.split()[0]) for text in found.groups())
            assert needed == before["paused_bytes"], message
            assert missing == needed - free_then, message
            assert_close_to(free_then, free, "free memory in the message", slack=4 * MIB)
            assert (" seconds" in message[found.end() :]) == (timeout is not None), message
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
    """Two processes with memory of LARGE each, paused. Where `left` is given only so much of the device is free."""
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
def test_two_processes_in_opposite_phase_change_places(exclusive: int, tmp_path: Path) -> None:
    """Each resumes while the other holds what it needs, and waits for it: memory, or the lock."""
    with two_processes(tmp_path, None if exclusive else ENOUGH_FOR_ONE) as (one, two):
        active, waiting = one, two
        active.do("resume", 0, exclusive)
        for _ in range(ROUNDS):
            waiting.tell("resume_told", PATIENCE_S, exclusive)
            assert waiting.answer() == "waiting"
            active.do("check")
            active.do("pause")
            assert waiting.answer() == "ok"
            active, waiting = waiting, active
        active.do("check")
        active.do("pause")


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
        two.tell("resume_told", PATIENCE_S, 1)
        assert two.answer() == "waiting"
        one.kill()
        assert two.answer() == "ok"
        two.do("check")


# -- captures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("how", ["cuda_graph", "torch.cuda.graph", "current stream"])
def test_pause_and_resume_during_a_capture(how: str, mode: str) -> None:
    tensors, sums = weights_and_cache()
    saver.pause("kv_cache")
    result = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with contextlib.ExitStack() as stack:
        if how == "cuda_graph":
            stack.enter_context(saver.cuda_graph(graph, tag="cuda_graph", capture_error_mode=mode))
        elif how == "torch.cuda.graph":
            stack.enter_context(torch.cuda.graph(graph, capture_error_mode=mode))
        else:
            stack.enter_context(torch.cuda.stream(stream))
            graph.capture_begin(capture_error_mode=mode)
            stack.callback(graph.capture_end)
        result.add_(1)
        for tags in ("weights", None):
            with pytest.raises(errors.CaptureInProgressError):
                saver.pause(tags)
            with pytest.raises(errors.CaptureInProgressError):
                saver.resume("kv_cache", timeout=PATIENCE_S)
        result.add_(1)
    assert states(tensors[:2]) == {core.STATE_ACTIVE}
    assert states(tensors[2:]) == {core.STATE_PAUSED}
    saver.pause()
    saver.resume()
    graph.replay()
    assert bool((result == 2).all()), "the capture went on"
    assert_all_there(tensors, sums)
    del graph


# -- work in flight ----------------------------------------------------------------------------------------------------


def test_two_threads_pause_while_their_kernels_and_each_others_run_on_several_streams(tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    backups = {"first": {"enable_cpu_backup": True}, "second": {"enable_disk_backup": True}}
    tensors: dict[str, list[torch.Tensor]] = {}
    for tag, settings in backups.items():
        with saver.region(tag=tag, **settings):
            tensors[tag] = [empty(8 * MIB) for _ in range(3)]
        for tensor in tensors[tag]:
            tensor.zero_()
    torch.cuda.synchronize()
    queued = threading.Barrier(2)
    events: list[torch.cuda.Event] = []
    failures: list[BaseException] = []

    def work(tag: str) -> None:
        try:
            for value, tensor in enumerate(tensors[tag], 1):
                with torch.cuda.stream(torch.cuda.Stream()):
                    hold_stream()
                    for _ in range(10):
                        tensor.add_(value)
                    events.append(torch.cuda.Event())
                    events[-1].record()
            queued.wait(PATIENCE_S)
            saver.pause(tag)
        except BaseException as error:  # shown by the assertion below
            failures.append(error)
            queued.abort()

    threads = [threading.Thread(target=work, args=(tag,)) for tag in backups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert len(events) == 6 and all(event.query() for event in events)
    for tag in backups:
        assert states(tensors[tag]) == {core.STATE_PAUSED}
    assert saver.resume().allocations >= 2
    for tag in backups:
        for value, tensor in enumerate(tensors[tag], 1):
            assert bool((tensor == 10 * value).all())


@contextlib.contextmanager
def long_kernel(tensor: torch.Tensor) -> Iterator[torch.cuda.Event]:
    """A kernel on a stream of its own, much longer than a signal may take to be honoured, and behind it a write of 1 to the
    tensor; an event that follows both. On the simulated GPU the kernel lasts until the block is left."""
    torch.cuda.synchronize()
    done, gate = torch.cuda.Event(), random.getrandbits(30) | 1 << 30
    control = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"]) if SIMULATED else None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if control is None:
            torch.cuda._sleep(12 * SPIN_CYCLES)
        else:
            handle, address = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(tensor.data_ptr())
            assert control.tms_sim_launch_add(handle, address, ctypes.c_uint64(1), ctypes.c_uint8(0), gate) == 0
        tensor.fill_(1)
        done.record()
    if control is None:
        yield done
        return
    late = threading.Timer(PATIENCE_S, control.tms_sim_open_gate, (gate,))  # so that a wait that heeds no signal ends
    late.start()
    try:
        yield done
    finally:
        late.cancel()
        control.tms_sim_open_gate(gate)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("backup", ["none", "pinned", "disk"])
def test_ctrl_c_during_a_pause_that_waits_for_a_long_kernel(backup: str, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    settings = {"none": {}, "pinned": {"enable_cpu_backup": True}, "disk": {"enable_disk_backup": True}}[backup]
    with saver.region(tag="weights", **settings):
        tensor = empty(LARGE // 2)
    tensor.zero_()
    with long_kernel(tensor) as done:
        free, before = free_bytes_now(), core.counters()
        with pytest.raises(KeyboardInterrupt), while_waiting(interrupt):
            saver.pause("weights")
        assert not done.query(), "the call ended before the kernel"
        assert state_of(tensor) == core.STATE_ACTIVE
        now = core.counters()
        for name in ("resident_bytes", "paused_bytes", "host_backup_bytes", "disk_backup_bytes", "damaged"):
            assert now[name] == before[name], name
        assert_close_to(free_bytes_now(), free, "free memory", slack=4 * MIB)
    assert saver.pause("weights").allocations == 1
    assert done.query(), "this one waited for the kernel"
    saver.resume("weights")
    if backup != "none":
        assert bool((tensor == 1).all())
    write_and_check(tensor, 5)


def free_bytes_now() -> int:
    """Free memory, without waiting for the device."""
    return int(torch.cuda.mem_get_info()[0])


def test_a_signal_whose_handler_does_not_raise_does_not_end_a_pause() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(LARGE // 2)
    seen: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(long_kernel(tensor))

        def handle() -> None:
            with pytest.raises(errors.InvalidStateError):
                saver.resume()
            seen.append("pause refused a call from inside")
            stack.close()

        with while_waiting(handle):
            assert saver.pause("weights").allocations == 1
    assert len(seen) == 1
    saver.resume("weights")
    assert bool((tensor == 1).all())


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


# -- backup files ------------------------------------------------------------------------------------------------------


def backup_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".backup")


@pytest.mark.parametrize("damage", ["truncated", "emptied", "first byte", "last byte", "middle"])
def test_a_backup_file_that_was_changed_never_reaches_the_device(damage: str, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region(tag="weights", enable_disk_backup=True):
        tensor = empty(LARGE // 2)
    fill_random(tensor, 7)
    expected = checksum(tensor)
    saver.pause("weights")
    (file,) = backup_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    size = file.stat().st_size
    assert size >= LARGE // 2
    kept = file.read_bytes()
    where = {"first byte": 0, "last byte": LARGE // 2 - 1, "middle": LARGE // 4}.get(damage)
    if where is None:
        os.truncate(file, 0 if damage == "emptied" else LARGE // 2 - 1)
    else:
        with file.open("r+b") as stream:
            stream.seek(where)
            stream.write(bytes([kept[where] ^ 1]))
    free = free_bytes()
    for _ in range(2):
        with pytest.raises(errors.BackupIOError, match="changed or truncated"):
            saver.resume("weights")
        assert state_of(tensor) == core.STATE_PAUSED
        assert_close_to(free_bytes(), free, "free memory", slack=4 * MIB)
    file.write_bytes(kept)
    del kept
    assert saver.resume("weights").allocations == 1
    assert checksum(tensor) == expected
    del tensor
    tms.empty_cache()
    assert backup_files(tmp_path) == []


def test_a_process_killed_in_the_middle_of_a_pause_leaves_files_that_the_next_one_removes(tmp_path: Path) -> None:
    """And only those: a process that is alive keeps its own."""
    with SecondProcess() as alive:
        alive.do("directory", tmp_path)
        alive.do("allocate", "weights", 4 * MIB, "disk")
        alive.do("pause")
        (others,) = backup_files(tmp_path)
        arguments = (str(tmp_path), str(4 * LARGE))
        (killed,) = run_programs([Program("killed_in_pause.py", arguments, preload=STARTED_PRELOADED)])
        killed.check(-signal.SIGKILL)
        left = set(tmp_path.iterdir())
        assert set(backup_files(tmp_path)) > {others}, "the killed process has left a file"
        saver.set_disk_backup_dir(str(tmp_path))
        with saver.region(tag="weights", enable_disk_backup=True):
            tensor = empty(LARGE // 4)
        fill_random(tensor, 8)
        expected = checksum(tensor)
        saver.pause("weights")
        assert others in backup_files(tmp_path)
        assert len(backup_files(tmp_path)) == 2, "this process's and the living one's"
        assert len(left & set(tmp_path.iterdir())) == 2, "of what there was, the living one's lock and backup"
        saver.resume("weights")
        assert checksum(tensor) == expected
        alive.do("resume", 0, 0)
        alive.do("check")
    del tensor
    tms.empty_cache()
    assert backup_files(tmp_path) == []


# -- a device that is lost ---------------------------------------------------------------------------------------------


def lose(device: int) -> None:
    (done,) = run_programs([Program("lost_device.py", (str(device), "7"), preload=STARTED_PRELOADED)])
    done.check(7)
    print(done.output)
    assert done.output.endswith("ready\n")
    assert "torch_memory_saver" not in done.error, "the exit is silent"
    assert "terminate" not in done.error


def test_a_lost_device_is_an_exception_and_the_exit_is_silent() -> None:
    lose(0)


@pytest.mark.multigpu
def test_one_of_two_devices_is_lost() -> None:
    lose(1)


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
    with pytest.raises(errors.OutOfMemoryError, match="In all device 1 needs"):
        saver.resume(timeout=0.2)
    assert states(tensors) == {core.STATE_PAUSED}
    assert_close_to(free_bytes(0), free, "free memory of the device that has enough", slack=4 * MIB)

    def give_back() -> None:
        other.clear()
        torch.cuda.empty_cache()

    with while_waiting(give_back, lambda: states(tensors) == {core.STATE_PAUSED}):
        assert saver.resume(timeout=PATIENCE_S).allocations == 2
    assert_all_there(tensors, sums)


# -- random operations -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_random_operations(tmp_path: Path) -> None:
    """TMS_GPU_SEED repeats a run."""
    seed = int(os.environ.get("TMS_GPU_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"TMS_GPU_SEED={seed}")
    saver.set_disk_backup_dir(str(tmp_path))
    operations = Operations(seed)
    try:
        operations.run(RANDOM_OPERATIONS)
    except BaseException as error:
        raise AssertionError(f"TMS_GPU_SEED={seed}, after {operations.done}: {error!r}") from error
    finally:
        operations.close()
    print(f"{sum(operations.done.values())} operations, {operations.compared_bytes} bytes compared: {operations.done}")
    assert sum(operations.done.values()) == RANDOM_OPERATIONS
    assert set(operations.done) == {"allocate", "write", "fill", "copy", "compare", "free", "pause", "resume"} | {
        "read_backup",
        "empty_cache",
        "retain",
    }
