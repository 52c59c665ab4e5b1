"""One of two ranks with a communicator of its own beside PyTorch's, as vLLM and SGLang make it: a pause suspends it.

Run by torchrun with two processes. The argument is the path of an NCCL library; without one it is the library that PyTorch
has loaded. Each rank prints what the hook says and how much memory a pause has released.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from torch_memory_saver import nccl
from torch_memory_saver import torch_memory_saver as saver

FLOAT, SUM, SUSPEND_MEMORY, PERSISTENT_BYTES = 7, 0, 1, 2
COUNT = 1 << 20
WEIGHTS_BYTES = 64 << 20


class Id(ctypes.Structure):
    _fields_ = [("data", ctypes.c_byte * 128)]


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl")
numbers = torch.ones(COUNT, device="cuda")
dist.all_reduce(numbers)  # makes PyTorch's communicator, and loads its library
with open("/proc/self/maps") as maps:
    loaded = next(line.split()[-1] for line in maps if "/libnccl.so" in line)
library = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else loaded)
library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
library.ncclAllReduce.argtypes = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
]


def check(result: int) -> None:
    assert result == 0, f"NCCL returned {result}"


def make_communicator() -> ctypes.c_void_p:
    identity, made = Id(), ctypes.c_void_p()
    if rank == 0:
        check(library.ncclGetUniqueId(ctypes.byref(identity)))
    bytes_of_it = torch.tensor(list(bytes(identity)), dtype=torch.uint8)
    dist.broadcast(bytes_of_it, 0)
    identity = Id.from_buffer_copy(bytes(bytes_of_it.tolist()))
    check(library.ncclCommInitRank(ctypes.byref(made), world, identity, rank))
    return made


def all_reduce() -> None:
    """The communicators of both kinds work."""
    numbers.fill_(rank + 1)
    address, stream = numbers.data_ptr(), torch.cuda.current_stream().cuda_stream
    check(library.ncclAllReduce(address, address, COUNT, FLOAT, SUM, comm, stream))
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    assert bool((numbers == 3 * world).all()), numbers[:4].tolist()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def persistent_bytes() -> int | None:
    value = ctypes.c_uint64()
    if not hasattr(library, "ncclCommMemStats"):
        return None
    check(library.ncclCommMemStats(comm, PERSISTENT_BYTES, ctypes.byref(value)))
    return value.value


comm = make_communicator()
version = ctypes.c_int()
check(library.ncclGetVersion(ctypes.byref(version)))
with saver.region("w", backup="host"):
    weights = torch.full((WEIGHTS_BYTES,), 3, dtype=torch.uint8, device="cuda")
all_reduce()
hook = nccl.suspend_on_pause("w", groups=[dist.group.WORLD, (comm, library)])
cycles: list[dict[str, Any]] = []
for _ in range(2):
    dist.barrier()
    before = free_bytes()
    saver.pause("w")
    cycles.append(
        {
            "suspended": hook.suspended,
            "stays": hook.what_stays(),
            "remarks": saver.ledger(rank).remarks,
            "released": free_bytes() - before - WEIGHTS_BYTES,
        }
    )
    saver.resume("w")
    assert hook.suspended == () and bool((weights == 3).all())
    all_reduce()

if version.value >= 22907:  # its owner suspends it, as vLLM does
    check(library.ncclCommSuspend(comm, SUSPEND_MEMORY))
    saver.pause("w")
    assert hex(comm.value or 0) not in hook.suspended
    saver.resume("w")
    check(library.ncclCommResume(comm))
    all_reduce()
row = {
    "name": hex(comm.value or 0),
    "version": version.value,
    "file": os.path.basename(library._name),
    "persistent": persistent_bytes(),
    "group": dist.group.WORLD.group_name,
    "cycles": cycles,
}
# In one write, because the ranks share the output.
sys.stdout.write(json.dumps(row) + "\n")
sys.stdout.flush()
check(library.ncclCommDestroy(comm))
comm.value = None
saver.pause("w")  # the hook leaves alone what is gone
saver.resume("w")
hook.remove()
assert bool((weights == 3).all())
dist.destroy_process_group()
