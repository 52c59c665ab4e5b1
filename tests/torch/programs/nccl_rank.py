"""One of two ranks that use NCCL through torch.distributed; ranks.py explains how it is started.

The results of a rank are checked here, and those visible from outside by tests/torch/test_nccl.py.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import signal
import sys

import torch
import torch.distributed as dist
from ranks import RANKS, device, main, other, rank

#: More than one step of the simulated collectives, and not a multiple of the ranks.
MANY = 300_007
TYPES = (torch.float32, torch.bfloat16, torch.int64)


def full(value: float, count: int = MANY, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device=device)


def expect(tensor: torch.Tensor, *values: float) -> None:
    """The tensor is as many blocks of the same size as there are values."""
    for block, value in zip(tensor.cpu().chunk(len(values)), values, strict=True):
        assert torch.equal(block, torch.full_like(block, value)), (tensor.dtype, block, value)


def collectives() -> None:
    for dtype in TYPES:
        mine = full(rank + 3, dtype=dtype)
        both = full(0, 2 * MANY, dtype)
        for operation, result in (("SUM", 7), ("PRODUCT", 12), ("MAX", 4), ("MIN", 3)):
            tensor = mine.clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
            expect(tensor, result)
        tensor = mine.clone()
        dist.broadcast(tensor, 1)
        expect(tensor, 4)
        tensor = mine.clone()
        dist.reduce(tensor, 0)
        if rank == 0:
            expect(tensor, 7)
        dist.all_gather_into_tensor(both, mine)
        expect(both, 3, 4)
        lists = [full(0, dtype=dtype) for _ in range(RANKS)]
        dist.all_gather(lists, mine)
        expect(lists[0], 3)
        expect(lists[1], 4)
        # Each rank has a block for each: 10 * from + to.
        for block in range(RANKS):
            both[block * MANY : (block + 1) * MANY].copy_(full(10 * rank + block, dtype=dtype))
        tensor = full(0, dtype=dtype)
        dist.reduce_scatter_tensor(tensor, both)
        expect(tensor, 10 + 2 * rank)
        result = full(0, 2 * MANY, dtype)
        dist.all_to_all_single(result, both)
        expect(result, rank, 10 + rank)
        outputs = [full(0, dtype=dtype) for _ in range(RANKS)]
        dist.all_to_all(outputs, list(both.chunk(RANKS)))
        expect(outputs[0], rank)
        expect(outputs[1], 10 + rank)
        lists = [full(0, dtype=dtype) for _ in range(RANKS)]
        dist.gather(mine, lists if rank == 0 else None, 0)
        if rank == 0:
            expect(lists[0], 3)
            expect(lists[1], 4)
        dist.scatter(tensor, lists if rank == 0 else None, 0)
        expect(tensor, rank + 3)
    average = full(rank)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    expect(average, 0.5)
    dist.all_reduce(average, dist._make_nccl_premul_sum(3.0))
    expect(average, 3)
    dist.barrier()
    assert dist.get_world_size() == RANKS


def uneven() -> None:
    """Different sizes for each pair, which are sends and receives, and none at all."""
    sizes = [[1, 5], [0, 3]]
    source = full(rank, sum(sizes[rank]))
    result = full(-1, sizes[0][rank] + sizes[1][rank])
    dist.all_to_all_single(result, source, [sizes[0][rank], sizes[1][rank]], sizes[rank])
    expect(result[: sizes[0][rank]], 0)
    expect(result[sizes[0][rank] :], 1)


def transfers() -> None:
    tensor = full(rank)
    if rank == 0:
        dist.send(full(7), 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(full(8), 0)
    expect(tensor, 8 - rank)
    received = full(-1)
    operations = [dist.P2POp(dist.isend, full(rank + 20), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(received, other + 20)
    uneven()


def asynchronous() -> None:
    tensors = [full(rank + number) for number in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for number, tensor in enumerate(tensors):
        expect(tensor, 1 + 2 * number)
    with dist._coalescing_manager(device=device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for number, tensor in enumerate(tensors):
        expect(tensor, 2 + 4 * number)


def groups() -> None:
    """Groups of fewer and of all ranks, which are communicators of their own, and object collectives."""
    alone = [dist.new_group([number]) for number in range(RANKS)]
    both = dist.new_group([0, 1])
    tensor = full(rank + 1)
    dist.all_reduce(tensor, group=alone[rank])
    expect(tensor, rank + 1)
    dist.all_reduce(tensor, group=both)
    expect(tensor, 3)
    dist.barrier(group=both)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.destroy_process_group(both)


def captured() -> None:
    tensor, gathered = full(rank + 1), full(0, 2 * MANY)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
    for value in (1, 5):
        tensor.copy_(full(value + rank))
        graph.replay()
        torch.cuda.synchronize()
        expect(gathered, 2 * value + 1, 2 * value + 1)
    graph.reset()


def killed() -> None:
    """Rank 1 dies. Rank 0 waits for it: the watchdog of torch notices, and ends the process."""
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(full(1))
    torch.cuda.synchronize()


def late() -> None:
    """Rank 1 lives and does not take part, until rank 0 has gone: the time of the group is over."""
    group = dist.new_group()
    dist.barrier(group=group)  # The first operator of the process takes more than a second on a slow machine.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
    with open(f"{sys.argv[3]}.alive", "w") as alive:
        if rank == 0:
            fcntl.flock(alive, fcntl.LOCK_EX)
        dist.barrier()
        if rank == 0:
            dist.all_reduce(full(1), group=group)
            torch.cuda.synchronize()
        fcntl.flock(alive, fcntl.LOCK_EX)
    os._exit(0)


def aborted() -> None:
    """Rank 0 aborts work in which rank 1 never takes part; its stream continues after that."""
    tensor = full(1)
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        event = torch.cuda.Event()
        event.record()
        dist.distributed_c10d._get_default_group()._get_backend(device).abort()
        torch.cuda.synchronize()
        expect(full(3), 3)
    print("ok", flush=True)
    os._exit(0)  # the group is destroyed


def mismatched() -> None:
    """The requests of the ranks differ."""
    dist.all_reduce(full(1, 10 + rank))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(collectives, transfers, asynchronous, groups, captured, killed, late, aborted, mismatched)
