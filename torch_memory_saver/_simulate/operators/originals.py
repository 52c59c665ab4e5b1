"""PyTorch's own implementations of the few operators that need one, where they are replaced for CUDA.

PyTorch has one function for the CPU and CUDA in these: it looks at the device of the tensors. So it is reached through the
CPU's entry, which is not replaced.
"""

from __future__ import annotations

import torch

__all__ = ["copy", "random_number"]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """A copy between devices, or of bytes."""
    torch.ops.aten.copy_.default.redispatch(_CPU, to, source, non_blocking)


def random_number(to: torch.Tensor, generator: torch.Generator | None) -> None:
    """Fills a tensor of 64-bit integers with random numbers: a kernel that the simulated GPU interprets."""
    before = torch.cuda._exchange_device(to.device.index)  # which only the entry for CUDA would do
    try:
        torch.ops.aten.random_.default.redispatch(_CPU, to, generator=generator)
    finally:
        torch.cuda._maybe_exchange_device(before)
