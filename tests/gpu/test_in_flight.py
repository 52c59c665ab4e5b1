"""Guards pause and resume with other activity in this process: captures, kernels on several streams, signals. A refused call
changes nothing, an interrupted one is undone, and a successful one has waited for the work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_support import (
    LARGE,
    MIB,
    SIMULATED,
    SPIN_CYCLES,
    assert_close_to,
    core,
    empty,
    errors,
    hold_stream,
    saver,
    state_of,
    torch,
    write_and_check,
)
from waiting import interrupt, while_waiting
from weights_and_cache import PATIENCE_S, assert_all_there, states, weights_and_cache

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


# -- kernels and signals -----------------------------------------------------------------------------------------------


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
        for name in ("resident_bytes", "paused_bytes", "damaged"):
            assert now[name] == before[name], name
        for kind in ("host", "disk", "shared"):
            assert now[f"{kind}_backup_bytes"] == before[f"{kind}_backup_bytes"], kind
        assert_close_to(free_bytes_now(), free, "free memory", slack=4 * MIB)
    assert saver.pause("weights").allocations == 1
    assert done.query(), "this one waited for the kernel"
    saver.resume("weights")
    if backup != "none":
        assert bool((tensor == 1).all())
    write_and_check(tensor, 5)


@contextlib.contextmanager
def slow_copies() -> Iterator[None]:
    """On the simulated GPU, where they would be over before the call could be interrupted."""
    control = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"]) if SIMULATED else None
    if control is not None:
        control.tms_sim_set_bandwidth(ctypes.c_uint64(LARGE // 8))
    try:
        yield
    finally:
        if control is not None:
            control.tms_sim_set_bandwidth(ctypes.c_uint64(0))


def test_ctrl_c_during_a_resume_from_disk_beside_a_long_kernel(tmp_path: Path) -> None:
    """The kernel is not ours, and memory that the resume releases must not wait for it."""
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region(tag="weights", enable_disk_backup=True):
        tensor = empty(LARGE)
    with saver.region(tag="other"):
        other = empty(2 * MIB)
    tensor.fill_(3)
    saver.pause("weights")
    with long_kernel(other) as done:
        with slow_copies(), pytest.raises(KeyboardInterrupt), while_waiting(interrupt):
            saver.resume("weights")
        assert not done.query(), "the call ended before the kernel"
        assert state_of(tensor) == core.STATE_PAUSED
    saver.resume("weights")
    assert bool((tensor == 3).all())
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
