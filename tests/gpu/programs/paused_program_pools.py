"""TMS_INIT_ENABLE=1: a MemPool of the program is managed, even inside a region. While it is paused, PyTorch gets no free
block of it."""

from __future__ import annotations

import torch

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20


def find(tensor: torch.Tensor) -> _core.Segment:
    row = _core.find(tensor.data_ptr())
    assert row is not None
    return row


def refusal(pool: torch.cuda.MemPool) -> str:
    try:
        with torch.cuda.use_mem_pool(pool):
            torch.ones(MIB, device="cuda")
    except errors.InvalidStateError as error:
        return str(error)
    return ""


saver.stats()
pool, full = torch.cuda.MemPool(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    kept, gone = torch.ones(MIB, device="cuda"), torch.ones(MIB, device="cuda")
with torch.cuda.use_mem_pool(full):
    whole = torch.ones(16 * MIB, device="cuda")
with saver.region(tag="a"), torch.cuda.use_mem_pool(pool):
    inside = torch.ones(16 * MIB, device="cuda")
assert (find(kept).tag, find(inside).tag) == ("default", "a")
del gone
saver.pause("default")
assert "resume tag 'default' before allocating from the pool" in refusal(pool)
assert refusal(full) == "", "PyTorch has no free block there, and makes a new segment"
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=full.id):
        torch.ones(MIB, device="cuda")
    raise AssertionError("the capture was not refused")
except errors.InvalidStateError as error:
    assert "capturing into it again" in str(error)
torch.cuda.set_stream(torch.cuda.default_stream())
saver.resume()
assert refusal(pool) == ""
torch.cuda.synchronize()
del kept, inside, whole
print("ok")
