"""Captures actions, each in a process of its own: PyTorch's allocator stays in a capture that failed. Prints one line for
each: its label, and whether it was captured or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

#: The argument is a matrix of ones.
ACTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a mask and a number of the host": lambda matrix: matrix.index_put_((matrix > 0,), torch.zeros(())),
    "a mask and a number of the device": lambda matrix: matrix.index_put_((matrix > 0,), matrix[0, 0]),
    "indices and a number of the device": lambda matrix: matrix.index_put_((matrix[0].long(),), matrix[0, 0].clone()),
    "histogram": lambda matrix: matrix.histc(4),
    "histogram with limits": lambda matrix: matrix.histc(4, 0, 1),
    "counts": lambda matrix: matrix[0].long().bincount(),
    "eigenvalues": lambda matrix: torch.linalg.eigvalsh(matrix),
    "equal, the same": lambda matrix: torch.equal(matrix, matrix),
    "equal, another": lambda matrix: torch.equal(matrix, matrix.clone()),
}


def capture(action: Callable[[torch.Tensor], Any]) -> str:
    matrix, graph = torch.ones(2, 2, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            action(matrix)
            graph.capture_end()
        except RuntimeError:
            return "refused"
    return "captured"


for label, action in ACTIONS.items():
    child = os.fork()  # before the first use of CUDA
    if child == 0:
        print(label, capture(action), sep=": ", flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"{label}: the process died")
