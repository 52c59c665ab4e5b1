"""TMS_INIT_ENABLE=1 with PyTorch's expandable segments: one scenario, named by the first argument.

    python expandable_managed.py SCENARIO

Contents are kept in host memory (TMS_INIT_ENABLE_CPU_BACKUP=1), unless the scenario says otherwise.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.errors import InvalidStateError

MIB = 1 << 20
PIECE = 20 * MIB  # of large blocks


def filled(bytes: int, seed: int) -> torch.Tensor:
    return (torch.arange(bytes // 4, dtype=torch.int32, device="cuda") * 2654435761 + seed).view(torch.uint8)


def is_whole(tensor: torch.Tensor, seed: int) -> bool:
    return bool(torch.equal(tensor.cpu(), filled(tensor.numel(), seed).cpu()))


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def is_near(size: int, expected: int) -> bool:
    """Whether two sizes of device memory differ by no allocation. A real driver takes and returns some KiB at any time."""
    return abs(size - expected) < MIB


def resident() -> int:
    return int(_core.counters()["resident_bytes"])


def pieces(tensor: torch.Tensor) -> int:
    """The number of managed allocations that a tensor lies in."""
    end = tensor.data_ptr() + tensor.numel()
    return sum(row.address < end and row.address + row.bytes > tensor.data_ptr() for row in _core.segments())


def contents() -> None:
    """Contents come back in every cycle, and the memory of each pause goes to the driver."""
    tensors = [filled(size, seed) for seed, size in enumerate((96 * MIB, 3 * MIB, 4096, 30 * MIB))]
    assert pieces(tensors[0]) >= 5
    for _ in range(3):
        torch.cuda.empty_cache()
        before, held = used(), resident()
        report = saver.pause()
        assert report.bytes == held and resident() == 0, (report, held)
        assert is_near(before - used(), held), (before, used(), held)
        saver.resume()
        assert is_near(used(), before) and resident() == held
        assert all(is_whole(tensor, seed) for seed, tensor in enumerate(tensors))


def live_bytes() -> None:
    """A pause copies what is live, by blocks that lie in several pieces."""
    kept = filled(50 * MIB, 1)
    dropped = filled(25 * MIB, 2)
    other = filled(30 * MIB, 3)
    del dropped
    report = saver.pause()
    assert report.copied_bytes == 80 * MIB, report
    saver.resume()
    assert is_whole(kept, 1) and is_whole(other, 3)


def empty_cache() -> None:
    """While memory is paused, empty_cache() gives back what PyTorch does not use. Its addresses are free for a later map."""
    kept = filled(45 * MIB, 1)
    dropped = filled(70 * MIB, 2)
    last = filled(45 * MIB, 3)
    saver.pause()
    address = dropped.data_ptr()
    del dropped
    rows = len(_core.segments())
    saver.empty_cache()
    assert len(_core.segments()) < rows, "pieces without a tensor are given back while they are paused"
    saver.resume()
    assert is_whole(kept, 1) and is_whole(last, 3)
    again = filled(70 * MIB, 4)
    assert again.data_ptr() == address, "PyTorch maps the same addresses again"
    saver.pause()
    saver.resume()
    assert is_whole(kept, 1) and is_whole(again, 4) and is_whole(last, 3)


def other_threads() -> None:
    """Other threads map, unmap and empty the cache during pauses and resumes. Nothing waits for ever or is lost."""
    kept = [filled(45 * MIB, seed) for seed in range(3)]
    failures: list[BaseException] = []
    ended = threading.Event()

    def allocate() -> None:
        try:
            while not ended.is_set():
                blocks = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (30, 1, 65, 22)]
                del blocks[::2]
                torch.cuda.empty_cache()
                del blocks
                torch.cuda.empty_cache()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        saver.pause()
        saver.resume()
        assert all(is_whole(tensor, seed) for seed, tensor in enumerate(kept))
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    del kept
    saver.empty_cache()
    assert resident() == 0, "everything can be given back"


def disabled() -> None:
    """Inside disable() memory is ordinary, also while everything else is paused."""
    kept = filled(45 * MIB, 1)
    saver.pause()
    before = used()
    with saver.disable():
        other = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
        assert _core.find(other.data_ptr()) is None
        assert bool((other == 7).all())
        del other
    assert is_near(used(), before)
    saver.resume()
    assert is_whole(kept, 1)


def give_back_by_pieces(cached: torch.Tensor) -> list[torch.Tensor]:
    """Cut a block of 100 MiB into five tensors, which outlive the pool that they lie in. Give back every second one of them
    on its own, and return the others, which hold 2 and 4."""
    del cached
    tensors: list[torch.Tensor | None] = [torch.full((20 * MIB,), i, dtype=torch.uint8, device="cuda") for i in range(1, 6)]
    for index in (0, 2, 4):
        tensors[index] = None
        saver.empty_cache()
    return [tensor for tensor in tensors if tensor is not None]


def pieces_made_while_paused() -> None:
    """Tensors that were made during a pause are given back one by one, during it and after it."""
    kept = filled(45 * MIB, 1)
    saver.pause()
    others = give_back_by_pieces(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
    saver.resume()
    for _ in range(2):
        assert is_whole(kept, 1) and all(bool((other == i).all()) for other, i in zip(others, (2, 4), strict=True))
        saver.empty_cache()
        saver.pause()
        saver.resume()
    del others[0]
    saver.empty_cache()
    assert bool((others[0] == 4).all())
    others.clear()
    del kept
    saver.empty_cache()
    assert resident() == 0, "everything can be given back"


def at_run_time() -> None:
    """Expandable segments are switched on and off around steps."""
    # Before PyTorch 2.9 it has another name.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:False")
    ordinary = filled(45 * MIB, 1)
    torch.cuda.empty_cache()  # newer releases would use cached blocks of ordinary segments
    settings("expandable_segments:True")
    expandable = filled(45 * MIB, 2)
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = filled(45 * MIB, 3)
    settings("expandable_segments:False")
    kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert kinds == {False, True}
    torch.cuda.empty_cache()
    held = resident()
    assert saver.pause().bytes == held and resident() == 0
    saver.resume()
    assert is_whole(ordinary, 1) and is_whole(expandable, 2) and is_whole(weights, 3)


def backups() -> None:
    """Backups of a tensor in several pieces can be read, and preserve() keeps such a tensor without a backup."""
    kept = filled(45 * MIB, 1)
    saver.pause()
    for zero_copy in (False, True):
        copy = saver.get_cpu_backup(kept, zero_copy=zero_copy)
        assert copy is not None
    saver.resume()
    assert torch.equal(copy, filled(45 * MIB, 1).cpu())
    saver.pause(backup="disk")
    on_disk = saver.get_cpu_backup(kept)
    saver.resume()
    assert torch.equal(on_disk, copy) and is_whole(kept, 1)


def preserved() -> None:
    """Without a backup, preserve() keeps a tensor that lies in several pieces."""
    dropped = filled(45 * MIB, 1)
    kept = filled(75 * MIB, 2)
    saver.preserve(kept)
    report = saver.pause()
    assert report.copied_bytes == 75 * MIB, report
    saver.resume()
    assert is_whole(kept, 2) and not is_whole(dropped, 1)


def graphs() -> None:
    """A graph that was captured by PyTorch alone replays after a pause."""
    state = torch.zeros(30 * MIB, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        state += 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state += 1
        double = state * 2
    for step in range(2, 5):
        graph.replay()
        assert bool((state == step).all()) and bool((double == 2 * step).all())
        saver.pause()
        saver.resume()
        assert bool((state == step).all())


def not_managed() -> None:
    """A thread whose region is switched off gets ordinary pieces beside managed ones, in one expandable segment."""
    managed = filled(45 * MIB, 1)
    wrapper = saver._impl._binary_wrapper.cdll
    torch.cuda.empty_cache()
    wrapper.tms_set_interesting_region(False)
    ordinary = filled(45 * MIB, 2)
    wrapper.tms_set_interesting_region(True)
    assert _core.find(ordinary.data_ptr() + PIECE) is None
    segments = [each for each in torch.cuda.memory_snapshot() if each["total_size"] > 2 * PIECE]
    assert len(segments) == 1, segments
    torch.cuda.empty_cache()
    mixed = filled(45 * MIB, 3)
    assert _core.find(mixed.data_ptr()) is None, "it begins in the last piece of the ordinary tensor"
    assert pieces(mixed) == 2 and not saver.is_paused(mixed) and saver.tag_of(mixed) == saver.tag_of(managed)
    saver.pause()
    assert saver.is_paused(mixed)
    with pytest.raises(InvalidStateError, match="is paused with tag"):
        saver.manage(mixed, tag="moved")
    assert not ordinary[PIECE : 2 * PIECE].cpu().equal(torch.zeros(PIECE, dtype=torch.uint8))
    saver.resume()
    assert is_whole(managed, 1) and is_whole(ordinary, 2) and is_whole(mixed, 3)
    tag = saver.tag_of(ordinary)
    moved = saver.manage([managed, ordinary], tag=tag, backup="host").moved_bytes
    assert moved == ordinary.numel(), "the end of one is ordinary memory"
    assert all(_core.find(ordinary.data_ptr() + offset) for offset in range(0, ordinary.numel(), PIECE))
    assert is_whole(managed, 1) and is_whole(ordinary, 2)


def peers() -> None:
    """Another GPU reads and writes memory after a pause, whether it was in use before or not."""
    if torch.cuda.device_count() < 2:
        print("one device")
        return
    kept = filled(45 * MIB, 1)
    saver.pause()
    other = torch.ones(45 * MIB, dtype=torch.uint8, device="cuda:1")
    saver.resume()
    assert torch.equal(kept.to("cuda:1").cpu(), kept.cpu()) and is_whole(kept, 1)
    kept.copy_(other)
    assert bool((kept == 1).all())


def receive(connection: Any, tensors: int) -> None:
    for _ in range(tensors):
        tensor, seed = connection.recv()
        connection.send(is_whole(tensor, seed))
        tensor.fill_(9)
        torch.cuda.synchronize()
        del tensor
        connection.send(True)


def sent() -> None:
    """A tensor in several pieces is sent to another process, which reads and writes it, before and after a pause."""
    here, there = torch.multiprocessing.get_context("spawn").Pipe()
    process = torch.multiprocessing.get_context("spawn").Process(target=receive, args=(there, 2))
    process.start()
    for seed in (1, 2):
        kept = filled(45 * MIB, seed)
        here.send((kept, seed))
        assert here.recv() and here.recv()
        assert bool((kept == 9).all())
        saver.pause()
        saver.resume()
        assert bool((kept == 9).all())
    process.join()
    assert process.exitcode == 0


SCENARIOS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        contents,
        live_bytes,
        empty_cache,
        other_threads,
        disabled,
        pieces_made_while_paused,
        at_run_time,
        backups,
        preserved,
        graphs,
        not_managed,
        peers,
        sent,
    )
}

if __name__ == "__main__":
    assert os.environ["TMS_INIT_ENABLE"] == "1"
    torch.zeros(1, device="cuda")
    _ = saver.hook_mode, saver.pause(), saver.resume()
    SCENARIOS[sys.argv[1]]()
    print("ok")
