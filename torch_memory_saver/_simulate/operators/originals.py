"""PyTorch's own implementations of a few operators that are replaced for CUDA.

For these operators PyTorch has one function for the CPU and CUDA, which checks the device of the tensors. The CPU's dispatch
key is not replaced and reaches this function.
"""

from __future__ import annotations

import functools

import torch

from torch_memory_saver._simulate.operators import native

__all__ = ["copy", "draw"]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copies between devices, or copies bytes unchanged on one device."""
    torch.ops.aten.copy_.default.redispatch(_CPU, to, source, non_blocking)


@functools.cache
def _nowhere(index: int) -> torch.Tensor:
    """A tensor without memory on this device. Nothing reads or writes it."""
    device, size = torch.device("cuda", index), torch.int64.itemsize
    storage = torch._C._construct_storage_from_data_pointer(size, device, size)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)


def draw(device: torch.device, generator: torch.Generator | None) -> native.Draw:
    """Draws from PyTorch's generator. PyTorch's kernel for a random number is launched, but does not run: its arguments are
    the state of the generator. So the generator advances, is saved, restored and replayed as in PyTorch."""
    before = torch.cuda._exchange_device(device.index)  # dispatch through the CPU key does not set the device
    native.begin_draw()
    try:
        torch.ops.aten.random_.default.redispatch(_CPU, _nowhere(device.index), generator=generator)
    finally:
        drawn = native.end_draw()
        torch.cuda._maybe_exchange_device(before)
    if drawn is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} draws random numbers by a kernel that the simulated GPU does not know"
        )
    return drawn
