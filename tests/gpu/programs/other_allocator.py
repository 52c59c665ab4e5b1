"""The program has made another allocator PyTorch's current one, as users of RMM do.

    python other_allocator.py FOLDER

Preload mode manages the allocator's cudaMalloc in regions. In torch mode regions are refused by name, and nothing else is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

SOURCE = """
#include <stddef.h>
extern int cudaMalloc(void **, size_t);
extern int cudaFree(void *);
void *allocate(size_t size, int device, void *stream) { void *p = 0; return cudaMalloc(&p, size) ? 0 : p; }
void release(void *p, size_t size, int device, void *stream) { cudaFree(p); }
"""
folder = Path(sys.argv[1])
(folder / "a.c").write_text(SOURCE, encoding="ascii")
subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "a.so"), str(folder / "a.c")], check=True)
allocator = torch.cuda.memory.CUDAPluggableAllocator(str(folder / "a.so"), "allocate", "release")
torch.cuda.memory.change_current_allocator(allocator)

MIB = 1 << 20

ordinary = torch.full((4 * MIB,), 2, dtype=torch.uint8, device="cuda")
assert saver.stats().total.resident_bytes == 0
saver.empty_cache()
assert saver.pause().bytes == 0
saver.resume()
assert saver.tag_of(ordinary) is None
if _core.preloaded:
    with saver.region(tag="weights", backup="host"):
        weights = torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda")
        with saver.disable():
            other = torch.full((4 * MIB,), 5, dtype=torch.uint8, device="cuda")
    assert [saver.tag_of(weights), saver.tag_of(other)] == ["weights", None]
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    assert saver.pause("weights").bytes == 64 * MIB
    assert torch.cuda.mem_get_info()[0] - before == 64 * MIB
    copy = saver.get_cpu_backup(weights)
    assert copy is not None and bool((copy == 3).all())
    assert bool((other == 5).all()) and bool((ordinary == 2).all())
    saver.resume("weights")
    assert bool((weights == 3).all())
else:
    try:
        with saver.region(tag="weights"):
            raise AssertionError("the region was not refused")
    except errors.InvalidStateError as error:
        assert "change_current_allocator()" in str(error) and "preload library" in str(error), error
        assert "unset" not in str(error), error
print("ok")
