"""Guards that only live bytes are copied: the blocks of PyTorch's segments that a tensor has or a stream still uses."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region
from gpu_programs import Program, run_programs
from gpu_support import (
    MIB,
    SIMULATED,
    STARTED_PRELOADED,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    hold_stream,
    saver,
    segment_of,
    skip_where_the_outer_pool_wins,
    tensor_at,
    torch,
)

#: Bytes; each segment of PyTorch's gets several, or one and a rest.
SIZES = [64 << 10, 200_000, MIB - 512, 3 * MIB, 64 << 10, 8 * MIB, 512, 5 * MIB + 512, 640 << 10, 2 * MIB] * 3


def snapshot(tag: str) -> list[dict[str, Any]]:
    """PyTorch's segments in the managed memory of a tag."""
    managed = {row.address for row in core.segments() if row.tag == tag}
    return [row for row in torch.cuda.memory_snapshot() if row["address"] in managed]


def live_bytes(tag: str) -> int:
    return sum(int(row["active_size"]) for row in snapshot(tag))


def all_bytes(tag: str) -> int:
    return sum(row.bytes for row in core.segments() if row.tag == tag)


def with_holes(tag: str, **settings: Any) -> list[torch.Tensor]:
    """Random tensors of a tag, with free blocks between them."""
    with saver.region(tag=tag, **settings):
        tensors: list[Any] = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    del tensors[::2]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    assert 0 < live_bytes(tag) < all_bytes(tag)
    return tensors


@pytest.mark.parametrize("kind", ["pinned", "mmap", "disk"])
def test_live_blocks_alone_are_copied_and_come_back(kind: str, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(tmp_path)
    on_host: dict[str, Any] = {"enable_cpu_backup": True, "cpu_backup_backend": kind}
    settings = {"enable_disk_backup": True} if kind == "disk" else on_host
    tensors = with_holes("weights", **settings)
    sums = [checksum(tensor) for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        report = saver.pause("weights")
        assert report.copied_bytes == live_bytes("weights"), "after segments that hold nothing have gone back"
        assert report.bytes > report.copied_bytes
        other = empty(64 * MIB)
        other.fill_(0xA5)
        del other
        assert saver.resume("weights").copied_bytes == report.copied_bytes
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert [checksum(tensor) for tensor in tensors] == sums
    del tensors[1::2]
    report = saver.pause("weights")
    assert report.copied_bytes == live_bytes("weights")
    saver.resume("weights")
    assert [checksum(tensor) for tensor in tensors] == sums[::2]
    # Freed blocks are PyTorch's to hand out again.
    with saver.region(tag="weights", **settings):
        more = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in SIZES]
    assert [checksum(tensor) for tensor in tensors] == sums[::2]
    assert all(int(tensor.min()) == int(tensor.max()) == 7 for tensor in more)


def test_everything_is_copied_on_request() -> None:
    tensors = with_holes("weights", enable_cpu_backup=True)
    sums = [checksum(tensor) for tensor in tensors]
    report = saver.pause("weights", live_only=False)
    assert report.copied_bytes == all_bytes("weights") > live_bytes("weights")
    assert saver.resume("weights").copied_bytes == report.copied_bytes
    assert [checksum(tensor) for tensor in tensors] == sums


def test_segments_without_contents_are_released() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        kept, gone = empty(32 * MIB), empty(64 * MIB)
    fill_random(kept, 1)
    expected = checksum(kept)
    del gone
    report = saver.pause("weights")
    assert (report.allocations, report.bytes, report.copied_bytes) == (1, 32 * MIB, 32 * MIB)
    assert all_bytes("weights") == 32 * MIB
    saver.resume("weights")
    assert checksum(kept) == expected


def test_a_block_that_a_stream_still_uses_is_live() -> None:
    side = torch.cuda.Stream()
    with saver.region(tag="weights", enable_cpu_backup=True):
        kept, pending = torch.empty(64 << 10, device="cuda"), torch.empty(64 << 10, device="cuda")
    assert segment_of(kept).address == segment_of(pending).address, "they share a segment, which therefore stays"
    fill_random(pending.view(torch.uint8), 1)
    address, expected = pending.data_ptr(), checksum(pending)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        hold_stream()
        pending.record_stream(side)
    del pending
    states = {block["state"] for row in snapshot("weights") for block in row["blocks"]}
    assert states == {"active_allocated", "active_pending_free", "inactive"}
    assert saver.pause("weights").copied_bytes == 2 * (64 << 10) * 4
    saver.resume("weights")
    assert checksum(tensor_at(address, (64 << 10) * 4)) == expected


def test_memory_that_torch_does_not_know_is_copied_whole() -> None:
    tensors = with_holes("weights", enable_cpu_backup=True)
    sums = [checksum(tensor) for tensor in tensors]
    with core_region("weights", core.BACKUP_PINNED, True):
        address = core.allocate(6 * MIB, 0)
    outside = tensor_at(address, 6 * MIB)
    fill_random(outside, 99)
    expected = checksum(outside)
    assert saver.pause("weights").copied_bytes == live_bytes("weights") + 6 * MIB
    saver.resume("weights")
    assert checksum(outside) == expected
    assert [checksum(tensor) for tensor in tensors] == sums
    del outside
    assert core.free(address)


def test_a_graphs_pool_is_copied_whole() -> None:
    """The contents that a replay leaves in a block that the allocator shows as free, like reduce-overhead's outputs."""
    source = torch.arange(1 << 20, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph", enable_cpu_backup=True):
        output = source + 5
    address, size = output.data_ptr(), output.numel() * 8
    del output
    graph.replay()
    torch.cuda.synchronize()
    assert live_bytes("cuda_graph") < size <= all_bytes("cuda_graph")
    report = saver.pause("cuda_graph")
    assert report.copied_bytes == all_bytes("cuda_graph")
    saver.resume("cuda_graph")
    assert torch.equal(tensor_at(address, size).view(torch.int64).cpu(), torch.arange(1 << 20) + 5)
    del graph


def test_a_region_inside_a_capture_is_copied_whole_from_then_on() -> None:
    skip_where_the_outer_pool_wins()
    with saver.region(tag="inner", enable_cpu_backup=True):
        before = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    source = torch.arange(1 << 18, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"), saver.region(tag="inner", enable_cpu_backup=True):
        output, anchor = source * 3, source * 4
    address = output.data_ptr()
    assert segment_of(output) == segment_of(anchor)
    assert segment_of(output).tag == "inner"
    del output
    graph.replay()
    torch.cuda.synchronize()
    assert saver.pause("inner").copied_bytes == all_bytes("inner")
    saver.resume()
    assert torch.equal(tensor_at(address, 2 * MIB).view(torch.int64).cpu(), torch.arange(1 << 18) * 3)
    assert not before.any()
    del graph


@pytest.mark.skipif(SIMULATED, reason="needs a real GPU: the simulated one has no kernels of Triton's")
@pytest.mark.skipif(
    not STARTED_PRELOADED, reason="only in hook mode preload: without it torch.compile's graphs are not managed"
)
def test_outputs_of_reduce_overhead_live_through_a_pause() -> None:
    pytest.importorskip("triton")
    weight = torch.randn(1 << 20, device="cuda")
    compiled = torch.compile(lambda x: (x * weight).sin() + 1, mode="reduce-overhead")
    argument = torch.randn(1 << 20, device="cuda")
    with saver.region(tag="compiled", enable_cpu_backup=True):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            output = compiled(argument)
    expected = output.cpu()
    saver.pause("compiled")
    saver.resume("compiled")
    assert torch.equal(output.cpu(), expected)
    torch.compiler.cudagraph_mark_step_begin()
    assert torch.equal(compiled(argument).cpu(), expected)
    del output
    torch._dynamo.reset()


def test_other_threads_allocate_meanwhile() -> None:
    """In memory of their own, of PyTorch's and of another tag: no thread waits for ever, and nothing is lost."""
    tensors = with_holes("weights", enable_cpu_backup=True)
    sums = [checksum(tensor) for tensor in tensors]
    stop, failures = threading.Event(), []

    def work(number: int) -> None:
        try:
            kept: list[Any] = []
            turn = 0
            while not stop.is_set():
                turn += 1
                if number % 2:
                    kept.append(torch.full((MIB,), number, dtype=torch.uint8, device="cuda"))
                else:
                    with saver.region(tag="others", enable_cpu_backup=True):
                        kept.append(torch.full((MIB,), number, dtype=torch.uint8, device="cuda"))
                if len(kept) > 8:
                    assert all(int(tensor.min()) == int(tensor.max()) == number for tensor in kept)
                    del kept[turn % 3 :: 2]
        except BaseException as error:  # shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            saver.pause("weights")
            saver.resume("weights")
            assert [checksum(tensor) for tensor in tensors] == sums
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_get_cpu_backup_of_copied_and_of_skipped_bytes() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        first, gone, last = (torch.empty(256 << 10, dtype=torch.uint8, device="cuda") for _ in range(3))
    assert first.data_ptr() + (256 << 10) == gone.data_ptr(), "neighbours in one segment"
    fill_random(first, 1)
    fill_random(last, 2)
    wanted = [tensor.cpu() for tensor in (first, last)]
    between = tensor_at(gone.data_ptr(), 256 << 10)
    across = tensor_at(first.data_ptr() + 1024, 256 << 10)
    del gone
    assert saver.pause("weights").copied_bytes == 2 * (256 << 10)
    for zero_copy in (False, True):
        kept = [saver.get_cpu_backup(tensor, zero_copy=zero_copy) for tensor in (first, last)]
        assert all(torch.equal(host, expected) for host, expected in zip(kept, wanted, strict=True))
        assert saver.get_cpu_backup(between, zero_copy=zero_copy) is None
        assert saver.get_cpu_backup(across, zero_copy=zero_copy) is None
        del kept
    saver.resume("weights")


# The choice at the pause.


def test_a_pause_chooses_where_contents_go(tmp_path: Path) -> None:
    saver.set_disk_backup_dir(tmp_path)
    with saver.region(tag="weights", enable_cpu_backup=True):
        kept = empty(16 * MIB)
    with saver.region(tag="weights"):
        scratch = empty(16 * MIB)
    for seed, tensor in enumerate((kept, scratch)):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in (kept, scratch)]

    assert saver.pause("weights", backup="host").copied_bytes == 32 * MIB
    assert core.counters()["host_backup_bytes"] >= 32 * MIB
    saver.resume("weights")
    assert [checksum(tensor) for tensor in (kept, scratch)] == sums

    assert saver.pause("weights", backup="disk").copied_bytes == 32 * MIB
    counters = core.counters()
    assert counters["disk_backup_bytes"] >= 32 * MIB
    assert counters["host_backup_bytes"] == 0
    assert checksum(saver.get_cpu_backup(kept)) == sums[0]
    saver.resume("weights")
    assert [checksum(tensor) for tensor in (kept, scratch)] == sums

    assert saver.pause("weights").copied_bytes == 16 * MIB, "the region's choice again"
    saver.resume("weights", zero=True)
    assert checksum(kept) == sums[0]
    assert not scratch.any(), "what has no contents is zero"

    assert saver.pause("weights", backup="discard").copied_bytes == 0
    assert core.counters()["host_backup_bytes"] == 0
    report = saver.resume("weights", zero=True)
    assert report.copied_bytes == 0
    assert not kept.any()
    assert not scratch.any()


@pytest.mark.parametrize("size", [512, 3 * MIB + 512, 64 * MIB])
def test_zeroed_memory_of_every_size(size: int) -> None:
    with saver.region(tag="kv_cache"):
        cache = empty(size)
    cache.fill_(0xFF)
    saver.pause("kv_cache")
    saver.resume("kv_cache", zero=True)
    assert not cache.any()
    # All of the segment, also on a stream that has not waited for anything.
    row = segment_of(cache)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not tensor_at(row.address, row.bytes).any()


def test_bad_choices_change_nothing() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(2 * MIB)
    fill_random(tensor, 1)
    expected = checksum(tensor)
    for call in (
        lambda: saver.pause("weights", backup="tape"),
        lambda: saver.pause("weights", progress=3),  # type: ignore[arg-type]
        lambda: saver.resume("weights", host_memory="keep"),
        lambda: saver.region("weights", host_memory="keep"),
        lambda: setattr(saver, "host_memory", "keep"),
        lambda: saver.reserve_host_memory(-1),
        lambda: saver.reserve_host_memory(1 << 63),
        lambda: saver.reserve_host_memory(MIB, device=99),
    ):
        with pytest.raises(errors.InvalidArgumentError):
            call()
    assert checksum(tensor) == expected
    assert saver.stats().tags["weights"].paused_bytes == 0


# Progress.


def test_progress_is_reported_and_cancels_a_pause() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [empty(32 * MIB) for _ in range(4)]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    reported: list[tuple[int, int]] = []
    saver.pause("weights", progress=lambda *numbers: reported.append(numbers))
    assert reported[-1] == (128 * MIB, 128 * MIB)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    reported.clear()
    saver.resume("weights", progress=lambda *numbers: reported.append(numbers))
    assert reported[-1] == (128 * MIB, 128 * MIB)

    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        saver.pause("weights", progress=stop)
    saver.resume("weights")
    assert [checksum(tensor) for tensor in tensors] == sums


def test_a_callback_is_not_kept() -> None:
    class Progress:
        def __call__(self, done: int, total: int) -> None:
            pass

    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(2 * MIB)
    progress = Progress()
    alive = weakref.ref(progress)
    saver.pause("weights", progress=progress)
    saver.resume("weights", progress=progress)
    del progress
    assert alive() is None
    del tensor


# Fresh processes.


@pytest.mark.outer
def test_the_default_pool_of_a_process_that_manages_everything() -> None:
    variables = (("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1"))
    (done,) = run_programs([Program("live_default_pool.py", environment=variables, preload=True)])
    assert done.check().output.split() == ["ok"]


@pytest.mark.outer
def test_host_memory_after_a_resume() -> None:
    for done in run_programs([Program("host_memory.py", preload=preload) for preload in (False, True)]):
        assert done.check().output.split() == ["ok"]
