"""TMS_INIT_ENABLE=1 and TMS_INIT_ENABLE_CPU_BACKUP=1: the program allocates while PyTorch's default pool is paused.

python paused_default_pool.py SCENARIO
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
from collections.abc import Callable

import torch

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._engine.process import pool_store

MIB = 1 << 20
DEFAULT_POOL = (0, 0)
#: Sizes of small and of large blocks.
SIZES = (300, 4096, 600_000, MIB + 4, 3 * MIB, 11 * MIB, 21 * MIB)


def full(size: int, value: int, device: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=f"cuda:{device}")


def check(tensor: torch.Tensor, value: int) -> None:
    assert int(tensor.min()) == int(tensor.max()) == value, (tensor.numel(), value)


def is_paused(tensor: torch.Tensor) -> bool:
    found = _core.find(tensor.data_ptr())
    assert found is not None, "not managed"
    return bool(found.state != _core.STATE_ACTIVE)


def pool_of(tensor: torch.Tensor) -> tuple[int, ...]:
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("PyTorch does not list the tensor")


def expect(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def on_thread(work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def fragments(device: int = 0) -> dict[int, torch.Tensor]:
    """Tensors in segments of which a part is free, by their value."""
    every = [full(random.choice(SIZES), number % 251, device) for number in range(48)]
    return {number: tensor for number, tensor in enumerate(every) if number % 3 == 0}


def check_all(tensors: dict[int, torch.Tensor]) -> None:
    for number, tensor in tensors.items():
        check(tensor, number % 251)


def allocate_while_paused(device: int = 0) -> list[torch.Tensor]:
    made = [full(size, 7, device) for size in SIZES for _ in range(5)]
    for tensor in made:
        check(tensor, 7)
        assert not is_paused(tensor)
    return made


def assert_ordinary(device: int = 0) -> None:
    """PyTorch's allocations come from its default pool again, and its cache can be emptied."""
    assert pool_store.substitutes.target(device) == DEFAULT_POOL
    tensor = full(33 * MIB, 1, device)
    assert pool_of(tensor) == DEFAULT_POOL
    del tensor
    torch.cuda.empty_cache()
    idle = [row for row in torch.cuda.memory_snapshot() if all(block["state"] == "inactive" for block in row["blocks"])]
    assert idle == []


def blocks() -> None:
    """Blocks that were free, that become free, of each size, stream and thread, and blocks that a stream still uses."""
    tensors = fragments()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            kept = [full(size, 5) for size in SIZES]
            del kept[number::2]
    recorded = full(5 * MIB, 1)
    recorded.record_stream(streams[0])
    report = saver.pause()
    assert report.reusable_bytes == 0 and report.bytes > 0
    assert _core.counters()["resident_bytes"] == 0
    del kept, recorded
    for number in list(tensors)[::2]:
        del tensors[number]
    gc.collect()
    made = allocate_while_paused()
    del made
    made = allocate_while_paused()
    for stream in streams:
        with torch.cuda.stream(stream):
            made += allocate_while_paused()
    others: list[torch.Tensor] = []
    on_thread(lambda: others.extend(allocate_while_paused()))
    torch.cuda.synchronize()
    saver.resume()
    check_all(tensors)
    for tensor in (*made, *others):
        check(tensor, 7)
    on_thread(assert_ordinary)
    made.clear()
    others.clear()
    del tensor
    assert_ordinary()
    for _ in range(3):
        saver.pause()
        saver.resume()
        check_all(tensors)
    assert_ordinary()


def cycles() -> None:
    """Two pauses in a row, a pause of nothing, a resume in the background."""
    tensors = fragments()
    saver.pause()
    first = allocate_while_paused()
    assert saver.pause().reusable_bytes == 0
    assert all(map(is_paused, first))
    del first[::2]
    second = allocate_while_paused()
    assert saver.pause("unknown").bytes == 0
    assert pool_of(second[-1]) == pool_store.substitutes.target(0)
    pending = saver.resume(wait=False)
    pending.wait()
    check_all(tensors)
    for tensor in (*first, *second):
        check(tensor, 7)
    assert_ordinary()


def undone() -> None:
    """A pause and a resume that fail and are undone."""
    tensors = fragments()

    def fail(done: int, total: int) -> None:
        assert pool_store.substitutes.target(0) != DEFAULT_POOL
        raise KeyError(done)

    expect(KeyError, lambda: saver.pause(progress=fail))
    if any(map(is_paused, tensors.values())):
        saver.resume()  # a real GPU copies so few bytes before the first report: the pause was complete
    assert_ordinary()
    saver.pause()
    expect(KeyError, lambda: saver.resume(progress=fail))
    made = allocate_while_paused()
    saver.resume()
    check_all(tensors)
    check(made[-1], 7)
    assert_ordinary()


def refused() -> None:
    """A pause that is refused leaves nothing behind."""
    tensors = fragments()
    graph, static = torch.cuda.CUDAGraph(), full(MIB, 1)
    with torch.cuda.graph(graph):
        static.add_(1)
        expect(errors.CaptureInProgressError, saver.pause)
    assert_ordinary()
    graph.replay()
    check(static, 2)
    check_all(tensors)


def devices() -> None:
    """Two devices of which one is paused: a tensor on the other is as before."""
    torch.zeros(1, device="cuda:1")
    tensors = fragments(0)
    saver.pause()
    assert pool_store.substitutes.target(0) != DEFAULT_POOL
    made = allocate_while_paused(0) + allocate_while_paused(1)
    saver.resume()
    others = fragments(1)
    saver.pause()
    assert pool_store.substitutes.target(1) != DEFAULT_POOL
    del made
    made = allocate_while_paused(0) + allocate_while_paused(1)
    saver.resume()
    check_all(tensors)
    check_all(others)
    check(made[-1], 7)
    del made
    for device in (0, 1):
        assert_ordinary(device)


def regions() -> None:
    """Regions and disable() take precedence: those that are entered while paused, and this thread's own around the pause."""
    tensors = fragments()
    with saver.region(tag="outer", enable_cpu_backup=True):
        saver.pause("default")
        outer = full(3 * MIB, 1)
        assert _core.find(outer.data_ptr()).tag == "outer"  # type: ignore[union-attr]
        with saver.disable():
            ordinary = full(3 * MIB, 2)
            assert _core.find(ordinary.data_ptr()) is None
        outer = full(3 * MIB, 1)
        assert _core.find(outer.data_ptr()).tag == "outer"  # type: ignore[union-attr]
    made = allocate_while_paused()
    assert {_core.find(tensor.data_ptr()).tag for tensor in made} == {"default"}  # type: ignore[union-attr]
    with saver.region(tag="inner"):
        inner = full(3 * MIB, 3)
        assert _core.find(inner.data_ptr()).tag == "inner"  # type: ignore[union-attr]
    saver.pause("inner")
    made += allocate_while_paused()
    saver.resume("inner")
    assert pool_store.substitutes.target(0) != DEFAULT_POOL
    saver.resume()
    check(outer, 1)
    check(ordinary, 2)
    check_all(tensors)
    assert_ordinary()


def other_thread_in_region() -> None:
    """Its routing would give way, so the pause names the bytes."""
    tensors = fragments()
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with saver.region(tag="weights"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    assert saver.pause("default").reusable_bytes > 0
    assert pool_store.substitutes.target(0) == DEFAULT_POOL
    saver.resume()
    leave.set()
    thread.join()
    assert saver.pause("default").reusable_bytes == 0
    made = allocate_while_paused()
    saver.resume()
    check_all(tensors)
    check(made[0], 7)


def captures() -> None:
    """Graphs that are captured while paused have memory of their own."""
    tensors = fragments()
    saver.pause()
    graphs, outputs, static = [], [], full(MIB, 1)
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if number else saver.cuda_graph(graph, tag="graph"):
            outputs.append(static.add(1).add_(number))
        graphs.append(graph)
    target = pool_store.substitutes.target(0)
    assert target != DEFAULT_POOL and target not in map(pool_of, outputs)
    made = allocate_while_paused()
    saver.resume()
    made += allocate_while_paused()
    for graph in graphs:
        graph.replay()
    check(outputs[0], 2)
    check(outputs[1], 3)
    check_all(tensors)
    for tensor in made:
        check(tensor, 7)


def emptied() -> None:
    """empty_cache() returns paused segments without a tensor, and what was freed since the pause; meanwhile other threads
    get no paused block."""
    tensors, large = fragments(), full(64 * MIB, 9)
    saver.pause()
    paused = _core.counters()["paused_bytes"]
    del large
    made = full(48 * MIB, 1)
    kept = full(MIB, 2)
    del made
    stop = threading.Event()
    count = 0

    def work() -> None:
        nonlocal count
        while not stop.is_set() or not count:
            for size in SIZES:
                tensor = full(size, 7)
                assert not is_paused(tensor)
                check(tensor, 7)
                count += 1

    thread = threading.Thread(target=lambda: on_thread(work))
    thread.start()
    for _ in range(10):
        saver.empty_cache()
    stop.set()
    thread.join()
    saver.empty_cache()
    assert _core.counters()["paused_bytes"] <= paused - 64 * MIB
    assert _core.counters()["resident_bytes"] <= 4 * MIB, "the tensor that is kept, in a segment of small blocks"
    check(kept, 2)
    large = full(64 * MIB, 9)
    assert not is_paused(large)
    del large
    torch.cuda.empty_cache()
    assert _core.counters()["resident_bytes"] <= 4 * MIB, "PyTorch's own function does the same"
    assert pool_store.substitutes.target(0) != DEFAULT_POOL
    allocate_while_paused()
    saver.resume()
    check_all(tensors)
    check(kept, 2)
    assert_ordinary()


def dropped_pools() -> None:
    """MemPools that the program drops while paused."""
    first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(first):
        tensor = full(MIB, 1)
    tensors = fragments()
    saver.pause()
    with torch.cuda.use_mem_pool(second):
        assert pool_of(full(MIB, 1)) == tuple(second.id)
    del tensor, first, second
    gc.collect()
    allocate_while_paused()
    saver.resume()
    check_all(tensors)
    assert_ordinary()


def partial() -> None:
    """A pause of another tag makes no substitute."""
    tensors = fragments()
    with saver.region(tag="weights"):
        weights = full(MIB, 1)
    saver.pause("weights")
    assert_ordinary()
    assert is_paused(weights)
    saver.resume()
    check_all(tensors)


records: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("torch_memory_saver").addHandler(handler)
random.seed(1)
globals()[sys.argv[1]]()
expected = 1 if sys.argv[1] == "other_thread_in_region" else 0
assert len([record for record in records if "free blocks of PyTorch's default pool" in record]) == expected, records
print("ok")
