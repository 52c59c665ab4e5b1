"""A graph that was captured before the package was first used keeps its workspace. A pause that finds a block of the size of
a workspace warns once, and frees nothing. With the argument `later`, another graph is captured while the first one lives.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

WIDTH = 64 if torch.cuda.get_device_name() == "Simulated GPU" else 4096
matrix = torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.float32 if WIDTH == 64 else torch.bfloat16)
stream, other = torch.cuda.Stream(), torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    matrix @ matrix
torch.cuda.synchronize()
graph, never_captured = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    output = matrix @ matrix

from torch_memory_saver import torch_memory_saver as saver  # noqa: E402


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def work() -> None:
    with saver.region(tag="engine"):
        matrix @ matrix
    torch.cuda.synchronize()


records = Records()
logging.getLogger("torch_memory_saver").addHandler(records)
logging.getLogger("torch_memory_saver").propagate = False
with ThreadPoolExecutor(1) as pool:
    pool.submit(work).result()
for _ in range(2):
    saver.pause("engine")
    with torch.cuda.stream(stream):
        tensors = [torch.ones(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    output.zero_()
    graph.replay()
    assert bool((output == WIDTH).all())
    saver.resume("engine")
    with saver.region(tag="engine"):
        pass
(warning,) = [message for message in records.messages if "cuBLAS" in message]
assert "1 that were captured before" in warning, warning
if "later" in sys.argv:  # a graph that is captured now may use an old workspace as well, and outlives the first graph
    with torch.cuda.stream(other):
        matrix @ matrix
    torch.cuda.synchronize()
    later = torch.cuda.CUDAGraph()
    with torch.cuda.graph(later, stream=other):
        output = matrix @ matrix
graph.reset()
del graph
with saver.region(tag="engine"):
    matrix @ matrix
torch.cuda.synchronize()
saver.pause("engine")
if "later" in sys.argv:
    torch.cuda.empty_cache()
    output.zero_()
    later.replay()
    assert bool((output == WIDTH).all())
else:
    assert bool((matrix @ matrix == WIDTH).all())
torch.cuda.synchronize()
print("ok")
