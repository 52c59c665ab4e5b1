"""Guards the warnings about silent mistakes with PyTorch, each in a process of its own."""

from __future__ import annotations

import pytest
from gpu_programs import subprocess_run
from gpu_support import STARTED_PRELOADED, saver

PRELUDE = """
import logging
import sys
import torch
from torch_memory_saver import torch_memory_saver as saver

logging.basicConfig(format="%(message)s")
"""


def output_of(program: str) -> str:
    return subprocess_run(["-c", PRELUDE + program], {}, timeout=100).check().error


def test_a_pause_where_nothing_is_managed() -> None:
    output = output_of("t = torch.ones(24 << 20, dtype=torch.uint8, device='cuda'); saver.pause(); saver.pause()")
    assert output.count("PyTorch holds 24 MiB outside regions") == 1


@pytest.mark.skipif(STARTED_PRELOADED, reason="only in hook mode torch: the other has no allocator for a MemPool")
def test_a_pool_with_our_allocator_outside_regions() -> None:
    program = """
saver.pause()
pool = torch.cuda.MemPool(saver._impl._hook_util.get_allocator())
for _ in range(2):
    with torch.cuda.use_mem_pool(pool):
        t = torch.ones(24 << 20, dtype=torch.uint8, device="cuda")
"""
    output = output_of(program)
    assert output.count("a MemPool with this package's allocator outside every region") == 1


@pytest.mark.skipif(STARTED_PRELOADED, reason="only in hook mode torch: the other has no allocator for a MemPool")
def test_regions_graphs_and_their_tokens_are_no_use_outside_regions() -> None:
    program = """
with saver.region("a"):
    t = torch.ones(1 << 20, device="cuda")
    with saver.disable():
        u = torch.ones(1 << 20, device="cuda")
pool = torch.cuda.MemPool(saver._impl._hook_util.get_allocator())
for token in (None, torch.cuda.graph_pool_handle(), pool.id):
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, pool=token, tag="graph"):
        t + 1
    graph.replay()
"""
    assert "outside every region" not in output_of(program)


@pytest.mark.parametrize("pool", ["0", "1"])
def test_symmetric_memory_in_a_region(pool: str) -> None:
    program = f"""
import os
os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "{pool}"
import torch.distributed._symmetric_memory as symmetric
symmetric.empty(1 << 20, device="cuda")
with saver.region("a"):
    with saver.disable():
        symmetric.empty(1 << 20, device="cuda")
    print("until now nothing is wrong", file=sys.stderr)
    for _ in range(2):
        t = symmetric.empty(2 << 20, device="cuda")
    assert saver.tag_of(t) is None
symmetric.empty(1 << 20, device="cuda")
"""
    before, after = output_of(program).split("until now nothing is wrong")
    assert "symmetric" not in before
    assert after.count("symmetric memory were allocated") == after.count("8 MiB of symmetric memory") == 1
    assert "tag='a'" in after and "outside of regions" in after


def test_a_pytorch_that_is_newer_than_the_tested_ones() -> None:
    program = """
torch.__version__ = "2.99.0"
for tag in "ab":
    with saver.region(tag):
        t = torch.ones(1 << 20, device="cuda")
    saver.pause(tag)
"""
    assert output_of(program).count("PyTorch 2.99.0 is newer than") == 1


def test_what_a_capture_in_a_region_keeps_is_not_blamed_on_threads() -> None:
    """The workspace of cuBLAS and the state of random numbers are ordinary memory on purpose."""
    program = """
a = torch.ones(64, 64, device="cuda")
with saver.region("a"):
    with torch.cuda.stream(torch.cuda.Stream()):
        a @ a
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a @ a
assert not saver.tag_of(torch.ones(1, device="cuda"))
"""
    assert "Another thread took it" not in output_of(program)


def test_wrong_types_are_refused_by_name() -> None:
    program = """
with saver.region("a", enable_cpu_backup=True):
    t = torch.ones(1 << 20, device="cuda")
calls = [
    lambda: saver.preserve(t, parameters="no"),
    lambda: saver.get_cpu_backup(t, zero_copy="no"),
    lambda: saver.check_fresh(whole="no"),
    lambda: saver.cuda_graph(torch.cuda.CUDAGraph(), stream="default"),
    lambda: saver.pause(live_only=torch.ones(2)),
]
for call in calls:
    try:
        call()
    except saver.errors.InvalidArgumentError as error:
        print("refused:", error, file=sys.stderr)
"""
    output = output_of("from torch_memory_saver import errors\n" + program.replace("saver.errors", "errors"))
    assert output.count("refused:") == 5


def test_an_allocation_that_the_margin_forbids_says_so() -> None:
    """PyTorch's own error shows free memory, and knows of no margin."""
    program = """
torch.ones(1, device="cuda")
saver.memory_margin_bytes = torch.cuda.mem_get_info()[0] - (64 << 20)
for _ in range(2):
    try:
        with saver.region("a"):
            t = torch.ones(128 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("out of memory", file=sys.stderr)
"""
    output = output_of(program)
    assert output.count("out of memory") >= 2
    assert output.count("memory_margin_bytes keeps") == 1


def test_unknown_tags_in_this_process_do_not_raise() -> None:
    assert saver.preserved("never used") == ()
