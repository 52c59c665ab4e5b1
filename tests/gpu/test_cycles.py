"""Guards that hundreds of cycles leave device memory, host memory, file descriptors, threads and contents as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_support import (
    MIB,
    SIMULATED,
    assert_close_to,
    checksum,
    core,
    empty,
    fill_random,
    free_bytes,
    open_files,
    release_everything,
    resident_bytes,
    saver,
    torch,
)

CYCLES = 500 if SIMULATED else 1000
#: Cycles after which every lazily made thing exists.
WARM_UP = 150 if SIMULATED else 200
KIB = 1 << 10
#: Of a tensor that is kept, bytes. PyTorch makes a segment of 2 MiB for one of 1 MiB, and one of 20 MiB for a larger one,
#: all of which goes to the backup and back: 60 MiB in each cycle, which take the simulated GPU long.
KEPT = MIB if SIMULATED else 2 * MIB
#: Of a tensor whose contents are dropped, bytes. The simulated GPU fills all new memory with a pattern.
DROPPED = MIB if SIMULATED else 32 * MIB


def observed() -> tuple[int, int, int, int]:
    return (free_bytes(), resident_bytes(), open_files(), len(os.listdir("/proc/self/task")))


def assert_unchanged(before: tuple[int, int, int, int], after: tuple[int, int, int, int]) -> None:
    assert_close_to(after[0], before[0], "free device memory", slack=4 * MIB)
    assert after[1] - before[1] <= CYCLES * 8 * KIB, f"resident host memory grew by {(after[1] - before[1]) / MIB:.1f} MiB"
    # The driver may open a file or start a thread of its own now and then; a leak of ours would be one a cycle.
    assert after[2] - before[2] <= 2, "file descriptors"
    assert after[3] - before[3] <= 2, "threads"


@pytest.mark.timeout(180)
def test_cycles_with_a_graph_and_every_backup(tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(KEPT)
    with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        mapped = empty(KEPT)
    with saver.region(tag="weights", enable_disk_backup=True):
        filed = empty(KEPT)
    with saver.region(tag="kv_cache"):
        cache = [empty(DROPPED) for _ in range(8)]
    fill_random(weights, 1)
    fill_random(mapped, 2)
    fill_random(filed, 3)
    result = torch.zeros(KEPT // 8, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        result.copy_(weights.view(torch.int64) + mapped.view(torch.int64) * 3 + filed.view(torch.int64) * 5)
    graph.replay()
    expected = checksum(result)
    addresses = [tensor.data_ptr() for tensor in cache]
    base = None
    for cycle in range(CYCLES):
        saver.pause("kv_cache")
        saver.pause("weights")
        saver.pause("cuda_graph")
        saver.resume("cuda_graph")
        saver.resume("weights")
        saver.resume("kv_cache")
        if cycle % 50 == 0 or cycle == CYCLES - 1:
            result.zero_()
            graph.replay()
            assert checksum(result) == expected
        if cycle == WARM_UP:
            base = observed()
    assert base is not None
    assert_unchanged(base, observed())
    assert [tensor.data_ptr() for tensor in cache] == addresses
    counters = core.counters()
    assert (counters["damaged"], counters["quarantined_handles"], counters["quarantined_ranges"]) == (0, 0, 0)
    del graph, cache


@pytest.mark.timeout(180)
def test_regions_that_allocate_pause_resume_and_free() -> None:
    base = None
    for cycle in range(CYCLES):
        with saver.region(tag="scratch"):
            tensor = empty(8 * MIB)
            with saver.region(tag="inner"):
                inner = empty(2 * MIB)
        saver.pause("scratch")
        saver.resume("scratch")
        tensor.fill_(cycle % 200)
        del tensor, inner
        if cycle % 10 == 0:
            torch.cuda.empty_cache()
        if cycle == WARM_UP:
            release_everything()
            base = observed()
    release_everything()
    assert base is not None
    assert_unchanged(base, observed())
    assert core.counters()["allocations"] == 0
