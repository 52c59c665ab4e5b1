"""TMS_INIT_ENABLE=1: every workspace of cuBLAS lies in managed memory. While everything is paused, products inside disable()
work on each thread and stream that had a workspace.

With the argument `graph`, a graph uses the workspace of its stream as well.
"""

from __future__ import annotations

import sys
import threading

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

WIDTH = 64 if torch.cuda.get_device_name() == "Simulated GPU" else 4096
KIND = torch.float32 if WIDTH == 64 else torch.bfloat16
side = torch.cuda.Stream()
begin, paused, done = threading.Event(), threading.Event(), threading.Event()
failures: list[BaseException] = []


def check_product() -> None:
    matrix = torch.ones(WIDTH, WIDTH, device="cuda", dtype=KIND, requires_grad=True)
    product = matrix @ matrix
    (gradient,) = torch.autograd.grad(product.sum(), matrix)
    assert bool((product == WIDTH).all()) and bool((gradient == 2 * WIDTH).all())


def work() -> None:
    try:
        check_product()
        begin.set()
        assert paused.wait(60)
        with saver.disable():
            check_product()
    except BaseException as error:
        failures.append(error)
    finally:
        begin.set()
        done.set()


assert _core.preloaded
thread = threading.Thread(target=work)
thread.start()
assert begin.wait(60)
check_product()
weight = torch.ones(WIDTH, WIDTH, device="cuda", dtype=KIND)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    check_product()
graph = torch.cuda.CUDAGraph()
if "graph" in sys.argv:
    saver.stats()  # the first use
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        output = weight @ weight
for _ in range(2):
    saver.pause(backup="host")
    assert all(row.state == _core.STATE_PAUSED for row in _core.segments())
    paused.set()
    assert done.wait(60) and not failures, failures
    with saver.disable():
        check_product()
        with torch.cuda.stream(side):
            check_product()
    saver.resume()
    check_product()
    if "graph" in sys.argv:
        output.zero_()
        graph.replay()
        assert bool((output == WIDTH).all())
thread.join()
print("ok")
