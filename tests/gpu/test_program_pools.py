"""Guards pools of the program: a MemPool inside a region is ordinary memory in both hook modes, and PyTorch gets no paused
memory of a pool for a capture or a routing."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    MIB,
    STARTED_PRELOADED,
    core,
    empty,
    errors,
    is_managed,
    pool_snapshot,
    saver,
    segment_of,
    skip_where_the_outer_pool_wins,
    state_of,
    torch,
    write_and_check,
)
from other_threads import in_thread

#: An allocator of a program, whose memory comes from the CUDA runtime.
ALLOCATOR = """
#include <stddef.h>
extern int cudaMalloc(void **, size_t);
extern int cudaFree(void *);
void *allocate(size_t size, int device, void *stream) { void *p = 0; return cudaMalloc(&p, size) ? 0 : p; }
void release(void *p, size_t size, int device, void *stream) { cudaFree(p); }
"""


@pytest.fixture(autouse=True)
def newer_pytorch() -> None:
    skip_where_the_outer_pool_wins()


@contextlib.contextmanager
def pool_of_the_program(*arguments: Any) -> Iterator[Any]:
    """A MemPool, which is dropped with no work under way. PyTorch before 2.13 ends the process if a pool is routed then."""
    pool = torch.cuda.MemPool(*arguments)
    yield pool
    torch.cuda.synchronize()


def allocated_by_others(size: int = 4 * MIB) -> bool:
    """Whether memory that another library allocates on this thread is managed now."""
    found = ctypes.c_void_p()
    library = ctypes.CDLL(None)
    assert library.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(size)) == 0
    managed = core.find(int(found.value or 0)) is not None
    assert library.cudaFree(found) == 0
    return managed


def check_use_while_paused(pool: Any, **region: Any) -> None:
    """The program uses its pool inside a region, and again while the region's memory is paused."""
    with saver.region(tag="weights", backup="host", **region):
        weights = empty(16 * MIB)
        write_and_check(weights, 5)
        with torch.cuda.use_mem_pool(pool):
            scratch = empty(8 * MIB)
        later = empty(16 * MIB)
    assert [is_managed(each) for each in (weights, scratch, later)] == [True, False, True]
    address = scratch.data_ptr()
    write_and_check(scratch, 6)
    del scratch
    saver.pause("weights")
    with torch.cuda.use_mem_pool(pool):
        scratch = empty(8 * MIB)
    assert scratch.data_ptr() == address, "the pool's free block is used again"
    write_and_check(scratch, 7)
    with saver.region(tag="other"), torch.cuda.use_mem_pool(pool):
        inside = empty(8 * MIB)
    assert not is_managed(inside)
    write_and_check(inside, 8)
    saver.resume("weights")
    assert int(weights.min()) == int(weights.max()) == 5
    del scratch, inside


def test_a_pool_of_the_program_stays_ordinary_inside_a_region() -> None:
    with pool_of_the_program() as pool:
        check_use_while_paused(pool)


def test_a_pool_with_an_allocator_of_the_program_stays_ordinary(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "a.c").write_text(ALLOCATOR, encoding="ascii")
    library = tmp_path / "a.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "a.c")], check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "allocate", "release")
    with pool_of_the_program(allocator.allocator()) as pool:
        check_use_while_paused(pool)


def test_the_regions_settings_are_in_force_again_after_the_pool() -> None:
    with pool_of_the_program() as pool, pool_of_the_program() as second, saver.region(tag="a", host_memory="retain"):
        before = core.region_current()
        for _ in range(2):
            with torch.cuda.use_mem_pool(pool):
                with torch.cuda.use_mem_pool(second):
                    ordinary = empty(4 * MIB)
                also_ordinary = empty(4 * MIB)
                with saver.region(tag="b"):
                    managed = empty(4 * MIB)
                    assert core.region_current().tag == "b"
                    assert core.region_current().managed
                with pytest.raises(RuntimeError, match="already recording"), torch.cuda.use_mem_pool(pool):
                    pass
            assert core.region_current() == before
            assert [is_managed(each) for each in (ordinary, also_ordinary, managed)] == [False, False, True]
            assert segment_of(managed).tag == "b"
            assert allocated_by_others() is STARTED_PRELOADED
        del ordinary, also_ordinary, managed


def test_another_thread_keeps_the_settings_of_its_region() -> None:
    inside, found = threading.Event(), []

    def other() -> None:
        with saver.region(tag="other"):
            found.append(allocated_by_others())

    with pool_of_the_program() as pool, saver.region(tag="a"), torch.cuda.use_mem_pool(pool):
        inside.set()
        in_thread(other)
    assert found == [STARTED_PRELOADED]


def test_a_capture_into_paused_memory_is_refused_before_it_allocates() -> None:
    source = torch.ones(MIB, device="cuda")
    graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        output = source * 3
    saver.pause("graph")
    stream = torch.cuda.current_stream()
    before = pool_snapshot(graph.pool())
    try:
        with (
            pytest.raises(errors.InvalidStateError, match="resume tag 'graph' before capturing into it again"),
            torch.cuda.graph(second, pool=graph.pool()),
        ):
            source * 4
    finally:
        torch.cuda.set_stream(stream)  # PyTorch leaves the stream of a capture that failed to begin
    assert core.counters()["visible_captures"] == 0
    assert pool_snapshot(graph.pool()) == before
    saver.resume("graph")
    with torch.cuda.graph(second, pool=graph.pool()):
        other = source * 4
    graph.replay()
    assert float(output.sum()) == 3.0 * MIB
    second.replay()
    assert float(other.sum()) == 4.0 * MIB
    assert state_of(output) == core.STATE_ACTIVE
    del output, other, graph, second


@pytest.mark.skipif(not STARTED_PRELOADED, reason="only in hook mode preload: otherwise the graph's pool is ordinary")
def test_a_graph_pool_that_a_region_captures_is_managed() -> None:
    source = torch.ones(MIB, device="cuda")
    graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with saver.region(tag="graph", backup="host"), torch.cuda.graph(graph):
        output = source * 3
    assert segment_of(output).tag == "graph"
    graph.replay()
    saver.pause("graph")
    stream = torch.cuda.current_stream()
    with pytest.raises(errors.InvalidStateError, match="'graph'"), torch.cuda.graph(second, pool=graph.pool()):
        source * 4
    torch.cuda.set_stream(stream)
    saver.resume("graph")
    assert float(output.sum()) == 3.0 * MIB
    del output, graph, second


@pytest.mark.outer
def test_pools_of_a_process_that_manages_everything_are_refused_while_they_are_paused() -> None:
    program = Program("paused_program_pools.py", environment=(("TMS_INIT_ENABLE", "1"),), preload=True)
    assert run_programs([program])[0].check().output.splitlines()[-1] == "ok"
