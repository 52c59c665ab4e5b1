"""Regions while PyTorch does not cache: PYTORCH_NO_CUDA_MEMORY_CACHING=1, or switched off at run time.

python uncached.py [off]
"""

from __future__ import annotations

import logging
import sys

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20

records: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("torch_memory_saver").addHandler(handler)


def warned(text: str) -> int:
    return len([record for record in records if "PyTorch calls cudaMalloc for each allocation" in record and text in record])


def weights(tag: str) -> torch.Tensor:
    with saver.region(tag, enable_cpu_backup=True):
        return torch.full((4 * MIB,), 5, dtype=torch.uint8, device="cuda")


at_run_time = sys.argv[1:] == ["off"]
if at_run_time:
    assert _core.find(weights("before").data_ptr()) is not None
    assert not warned("")
    torch.cuda.caching_allocator_enable(False)
first, second = weights("first"), weights("second")
report = saver.pause()
if _core.preloaded:
    assert {_core.find(tensor.data_ptr()).tag for tensor in (first, second)} == {"first", "second"}  # type: ignore[union-attr]
    assert report.bytes >= 8 * MIB
    assert not warned("manages nothing")
else:
    assert _core.find(first.data_ptr()) is None
    assert warned("region(tag='first') manages nothing") == warned("manages nothing") == 1, records
saver.resume()
assert bool((first == 5).all()) and bool((second == 5).all())
for _ in range(2):
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph):
        first.add_(1)
    graph.replay()
assert warned("a capture fails as soon as it allocates") == 1, records
assert bool((first == 7).all())
if at_run_time:
    torch.cuda.memory.caching_allocator_enable(True)
    assert _core.find(weights("after").data_ptr()) is not None
    assert len(records) == 1 + (not _core.preloaded), records
print("ok")
