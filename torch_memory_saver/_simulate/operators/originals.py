"""PyTorch's own CUDA implementations of the few operators that need one, kept before they are replaced."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["copy", "keep", "random_number"]

_kernels: dict[str, Any] = {}


def keep() -> None:
    """Remembers them. To be called before they are replaced."""
    for operator in (torch.ops.aten.copy_.default, torch.ops.aten.random_.default):
        _kernels[operator.name()] = torch.library.get_kernel(operator, "CUDA")


def _call(name: str, *arguments: Any, **keywords: Any) -> Any:
    return _kernels[name].call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments, **keywords)


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """A copy between devices, or of bytes."""
    _call("aten::copy_", to, source, non_blocking)


def random_number(to: torch.Tensor, generator: torch.Generator | None) -> None:
    """Fills a tensor of 64-bit integers with random numbers: a kernel that the simulated GPU interprets."""
    _call("aten::random_", to, generator=generator)
