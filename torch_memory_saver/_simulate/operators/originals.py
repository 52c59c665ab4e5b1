"""PyTorch's own implementations of a few operators that are replaced for CUDA.

For these operators PyTorch has one function for the CPU and CUDA, which checks the device of the tensors. The CPU's dispatch
key is not replaced and reaches this function.
"""

from __future__ import annotations

import torch

__all__ = ["copy", "random_number"]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copies between devices, or copies bytes unchanged on one device."""
    torch.ops.aten.copy_.default.redispatch(_CPU, to, source, non_blocking)


def random_number(to: torch.Tensor, generator: torch.Generator | None) -> None:
    """Fills a tensor of 64-bit integers with random numbers. The simulated GPU interprets PyTorch's kernel for this."""
    before = torch.cuda._exchange_device(to.device.index)  # dispatch through the CPU key does not set the device
    try:
        torch.ops.aten.random_.default.redispatch(_CPU, to, generator=generator)
    finally:
        torch.cuda._maybe_exchange_device(before)
