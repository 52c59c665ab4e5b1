"""Guards two GPUs in one process, and one process a GPU: peers, synchronisation of each device, collectives in graphs."""

from __future__ import annotations

import ctypes

import pytest
from gpu_programs import Program, run_programs, run_ranks
from gpu_support import (
    MIB,
    assert_close_to,
    checksum,
    core,
    driver,
    empty,
    fill_random,
    free_bytes,
    hold_stream,
    saver,
    segment_of,
    state_of,
    tensor_at,
    tms,
    torch,
    write_and_check,
)
from peer_kernel import AddOne

pytestmark = pytest.mark.multigpu


@pytest.fixture(autouse=True)
def both_devices_in_use(clean_gpu: None) -> None:
    for device in (0, 1):
        torch.ones(1, device=f"cuda:{device}")
        torch.cuda.synchronize(device)


def current_context() -> int:
    context = ctypes.c_void_p()
    assert driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
    return int(context.value or 0)


@pytest.mark.parametrize("owner", [0, 1])
def test_managed_memory_is_readable_and_writable_from_the_other_gpu(owner: int) -> None:
    other = 1 - owner
    with saver.region(tag="weights", enable_cpu_backup=True), torch.cuda.device(owner):
        managed = empty(64 * MIB, owner)
    fill_random(managed, 1)
    source = empty(64 * MIB, other)
    fill_random(source, 2)
    for _ in range(2):
        expected = checksum(managed)
        copied = managed.to(f"cuda:{other}")
        assert checksum(copied) == expected, "read by a copy"
        managed.copy_(source)
        assert checksum(managed) == checksum(source), "written by a copy"
        saver.pause("weights")
        saver.resume("weights")
        assert checksum(managed) == checksum(source)
        source.view(torch.int64).add_(1)
    torch.cuda.synchronize()


class Location(ctypes.Structure):
    """CUmemLocation; type 1 is a device."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def access(address: int, device: int) -> int:
    """0: none, 1: read, 3: read and write."""
    flags = ctypes.c_ulonglong()
    location = Location(1, device)
    result = driver().cuMemGetAccess(ctypes.byref(flags), ctypes.byref(location), ctypes.c_uint64(address))
    assert result == 0
    return flags.value


def spin_then_read(kernel: AddOne, source: int, target: torch.Tensor) -> torch.cuda.Event:
    """Queues a long kernel on GPU 1 and behind it one that reads GPU 0's memory; returns an event that follows both."""
    with torch.cuda.device(1):
        stream = torch.cuda.Stream(device=1)
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            hold_stream()
            kernel.launch(source, target.data_ptr(), target.numel() // 4, stream)
            done.record(stream)
    return done


def test_a_kernel_of_one_gpu_reads_the_other_ones_memory_at_pause() -> None:
    kernel = AddOne(1)
    with saver.region(tag="weights"):
        managed = empty(64 * MIB, 0)
    managed.view(torch.int32).fill_(7)
    target = empty(64 * MIB, 1)
    target.zero_()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    done = spin_then_read(kernel, managed.data_ptr(), target)
    assert not done.query()
    saver.pause("weights")
    assert done.query(), "the pause waited for the other GPU"
    torch.cuda.synchronize(1)
    assert bool((target.view(torch.int32) == 8).all())
    saver.resume("weights")
    write_and_check(managed, 1)


def test_a_free_waits_for_a_kernel_of_the_other_gpu() -> None:
    kernel = AddOne(1)
    address = core.allocate(64 * MIB, 0)
    tensor_at(address, 64 * MIB).view(torch.int32).fill_(9)
    target = empty(64 * MIB, 1)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    done = spin_then_read(kernel, address, target)
    assert not done.query()
    assert core.free(address)
    assert done.query()
    torch.cuda.synchronize(1)
    assert bool((target.view(torch.int32) == 10).all())


def test_kernels_of_both_gpus_write_each_others_memory_after_a_resume() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [empty(16 * MIB, device) for device in (0, 1)]
    for tensor in tensors:
        tensor.view(torch.int32).fill_(3)
    for _ in range(2):
        for tensor in tensors:
            assert [access(tensor.data_ptr(), device) for device in (0, 1)] == [3, 3]
        saver.pause("weights")
        saver.resume("weights")
    for device, tensor in enumerate(tensors):
        kernel = AddOne(1 - device)
        with torch.cuda.device(1 - device):
            stream = torch.cuda.Stream(device=1 - device)
            kernel.launch(tensor.data_ptr(), tensor.data_ptr(), 4 * MIB, stream)
            stream.synchronize()
        assert bool((tensor.view(torch.int32) == 4).all())
    del tensors, tensor


@pytest.mark.parametrize("current", [0, 1])
def test_regions_on_both_devices_pause_on_all_and_restore_the_current_device(current: int) -> None:
    with torch.cuda.device(current):
        with saver.region(tag="weights", enable_cpu_backup=True):
            tensors = [empty(128 * MIB, device) for device in (0, 1)]
        with saver.region(tag="kv_cache"):
            caches = [empty(256 * MIB, device) for device in (1, 0)]
        for device, tensor in enumerate(tensors):
            fill_random(tensor, device)
        sums = [checksum(tensor) for tensor in tensors]
        assert [core.find(tensor.data_ptr()).device for tensor in (*tensors, *caches)] == [0, 1, 1, 0]  # type: ignore[union-attr]
        context = current_context()
        free = [free_bytes(device) for device in (0, 1)]
        report = saver.pause()
        assert (report.allocations, report.bytes) == (4, 768 * MIB)
        for device in (0, 1):
            assert_close_to(free_bytes(device) - free[device], 384 * MIB, f"free memory gained on GPU {device}")
        assert torch.cuda.current_device() == current
        assert current_context() == context
        report = saver.resume()
        assert (report.allocations, report.bytes) == (4, 768 * MIB)
        assert torch.cuda.current_device() == current
        assert current_context() == context
    assert [checksum(tensor) for tensor in tensors] == sums
    for value, tensor in enumerate(caches):
        write_and_check(tensor, value)
    del tensors, caches, tensor


def test_gradients_on_both_gpus_are_managed() -> None:
    with saver.region(tag="trainer"):
        weights = [torch.ones(4 * MIB, device=f"cuda:{device}", requires_grad=True) for device in (0, 1)]
        total = (weights[0] * 2).to("cuda:1") * weights[1] * 3
        total.backward(torch.ones_like(total))
    found = [segment_of(tensor.grad) for tensor in weights if tensor.grad is not None]
    assert [(row.device, row.tag) for row in found] == [(0, "trainer"), (1, "trainer")]
    for tensor in weights:
        assert torch.equal(tensor.grad.cpu(), torch.full((4 * MIB,), 6.0))
    del total, weights, tensor


def test_out_of_memory_on_one_device_leaves_both_as_they_were() -> None:
    with saver.region(tag="kv_cache"):
        caches = [empty(1024 * MIB, device) for device in (0, 1)]
    saver.pause()
    hog = empty((free_bytes(1) - 512 * MIB) // (2 * MIB) * (2 * MIB), 1)
    free = [free_bytes(device) for device in (0, 1)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        saver.resume()
    assert getattr(caught.value, "device", None) == 1
    assert {state_of(tensor) for tensor in caches} == {core.STATE_PAUSED}
    for device in (0, 1):
        assert_close_to(free_bytes(device), free[device], f"free memory of GPU {device}", slack=4 * MIB)
    del hog
    tms.empty_cache()
    torch.cuda.empty_cache()
    saver.resume()
    for value, tensor in enumerate(caches):
        write_and_check(tensor, value)
    del caches, tensor


def test_a_graph_on_the_second_gpu() -> None:
    # By default torch captures on a stream of the device of the first capture.
    with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="cuda_graph"):
        torch.ones(1, device="cuda:0")
    with torch.cuda.device(1):
        numbers = torch.arange(1 << 20, device="cuda:1", dtype=torch.float32)
        result = torch.zeros_like(numbers)
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, tag="cuda_graph"):
            result.copy_(numbers * 2 + 1)
        saver.pause("cuda_graph")
        saver.resume("cuda_graph")
        graph.replay()
        assert torch.equal(result, numbers * 2 + 1)
    assert {row.device for row in core.segments() if row.tag == "cuda_graph"} == {1}
    del graph


@pytest.mark.outer
def test_a_process_that_uses_one_gpu_pays_nothing_for_the_other() -> None:
    for done in run_programs([Program("one_of_two.py", preload=preload) for preload in (False, True)]):
        done.check()


@pytest.mark.outer
def test_gpus_that_are_first_used_inside_a_region_are_managed_and_entering_makes_no_context() -> None:
    for preload in (False, True):
        programs = [Program("first_use_in_region.py", (current,), preload=preload) for current in ("-1", "1")]
        for done in run_programs(programs):
            done.check()


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_a_captured_all_reduce_replays_after_a_pause(preload: bool) -> None:
    outputs = run_ranks("all_reduce.py", environment={"NCCL_GRAPH_REGISTER": "0"}, preload=preload)
    assert [output.count("ok") for output in outputs] == [1, 1]
