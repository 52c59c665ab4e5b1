"""Tensors that do not own their memory.

The results of a captured graph lie in its pool. While a tensor holds them, PyTorch's allocator does not give their memory to
another capture. Once another capture may use the memory, the tensor is replaced by one with the same address, type and shape
that the allocator does not know of.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["extent_bytes", "weak_tensor"]


class _Memory:
    """Memory at an address, described by the CUDA array interface.

    PyTorch keeps this object as long as the storage.
    """

    def __init__(self, address: int, size: int, keep: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        self._keep = keep


def weak_tensor(tensor: Any, keep: object) -> Any:
    """Return a tensor with the same memory and metadata that does not own the memory and has no history.

    Args:
        tensor: Any dense tensor on a GPU.
        keep: An object that lives as long as the result's storage. It has to keep the memory mapped.
    """
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    memory = _Memory(tensor.data_ptr(), extent_bytes(tensor), keep)
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def extent_bytes(tensor: Any) -> int:
    """Return the bytes from a tensor's address to the end of its last element."""
    if tensor.numel() == 0:
        return 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(elements * tensor.element_size())
