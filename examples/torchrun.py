"""One process for each GPU: every rank pauses and resumes its own memory, and collectives go on working.

Nothing about torch_memory_saver is distributed: each process has its own state. Registrations of physical memory do not
survive a pause, though, so NCCL must not register the memory of captured graphs: set NCCL_GRAPH_REGISTER=0 before NCCL
starts.

    torchrun --nproc-per-node=2 examples/torchrun.py
"""

import os

os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

import torch
import torch.distributed as dist
from _common import GIB, check, check_bytes, free_bytes, options, show

from torch_memory_saver import torch_memory_saver


def main() -> None:
    size = int(options(__doc__, gib=2).parse_args().gib * GIB)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" not in os.environ:
        raise SystemExit("run this with torchrun: torchrun --nproc-per-node=N examples/torchrun.py")
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))

    with torch_memory_saver.region(tag="weights", backup="host"):
        gradient = torch.full((size // 4,), float(rank + 1), device="cuda")
    result = torch.zeros_like(gradient)
    dist.all_reduce(result)  # NCCL is set up before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, capture_error_mode="thread_local", tag="cuda_graph"):
        summed = gradient * 2
        dist.all_reduce(summed)
        result.copy_(summed)

    before = free_bytes()
    show(f"rank {rank} is awake")
    report = torch_memory_saver.pause()
    show(f"rank {rank} is paused")
    check_bytes(free_bytes() - before, report.bytes, f"rank {rank} of {world} gave back")
    dist.barrier()  # every rank has paused; a trainer would work here
    torch_memory_saver.resume()
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    expected = 2.0 * sum(range(1, world + 1))
    check(bool((result == expected).all()), f"rank {rank}: the captured all-reduce over {world} processes gives {expected}")
    del graph
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
