"""Operators that need more than their CPU implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver._simulate.operators.launch import Call, copy_bytes, kernel_of, settings
from torch_memory_saver._simulate.operators.refusals import is_dense, refuse_overlaps
from torch_memory_saver._simulate.operators.wire import Operation

__all__ = ["choose_simulated_paths", "install", "refusal_of_quantised"]


#: The types that hold every Python number of a kind. torch.tensor's own choice loses digits.
_EXACT = {float: torch.float64, complex: torch.complex128}


def install(replace: Callable[..., None]) -> None:
    def copy_(to: torch.Tensor, source: torch.Tensor | complex, non_blocking: bool = False) -> torch.Tensor:
        """Copy a tensor.

        A copy of bytes is a CUDA copy. A copy on one device that changes the type or the order is an operator. PyTorch
        passes a number as such.
        """
        if not isinstance(source, torch.Tensor):
            source = torch.tensor(source, dtype=_EXACT.get(type(source)))
        same = to.device == source.device and to.device.type == "cuda"
        if same and to.shape != source.shape:
            torch.empty(to.shape, device="meta").copy_(torch.empty(source.shape, device="meta"))  # checks the shapes
        if same:
            refuse_overlaps(torch.ops.aten.copy_.default, (to, source), {})
        if to.device.type == source.device.type == "cuda" and not same and not _is_plain(to, source):
            return _convert_between_devices(to, source, non_blocking)
        if not same or _is_plain(to, source):
            copy_bytes(to, source, non_blocking)
            return to
        call = Call()
        taken = (call.take(to, True), call.take(source), False)
        call.run(Operation("aten::copy_", taken, None, tuple(call.shapes), (), settings=settings()))
        return to

    compare = kernel_of(torch.ops.aten.equal.default)

    def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether the tensors are equal. Views of the same elements are not read, so that a capture allows the
        call."""
        return _is_same_view(tensor, other) or bool(compare(tensor, other))

    replace("copy_", copy_)
    replace("equal", equal)


def _convert_between_devices(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Copy to another device and change the type or the order: an operator on each device, and bytes between
    them. PyTorch does the same where the devices cannot reach each other, and launches one kernel otherwise."""
    converted = torch.empty(to.shape, dtype=to.dtype, device=source.device).copy_(source)
    if to.is_contiguous():
        copy_bytes(to, converted, non_blocking)
        return to
    arrived = torch.empty_like(converted, device=to.device)
    copy_bytes(arrived, converted, non_blocking)
    return to.copy_(arrived)


def refusal_of_quantised(operator: Any) -> Callable[..., Any]:
    """Return an implementation for an operator of quantised tensors; it raises NotImplementedError."""

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(
            f"{operator.name()}: quantised tensors are copied to and from the simulated GPU, and not computed with there"
        )

    return kernel


def choose_simulated_paths() -> None:
    """Configure PyTorch to select implementations that use only operators with a CPU implementation."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _is_same_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the tensors are the same elements of one storage. NaNs count, as in PyTorch."""
    return bool(
        tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.is_conj() == other.is_conj()
        and tensor.is_neg() == other.is_neg()
        and tensor.device == other.device
        and tensor.numel() > 0
    )


def _is_plain(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether the copy leaves the bytes and their order unchanged."""
    return (
        to.dtype == source.dtype
        and to.shape == source.shape
        and to.is_conj() == source.is_conj()
        and to.is_neg() == source.is_neg()
        and ((to.is_contiguous() and source.is_contiguous()) or (to.stride() == source.stride() and is_dense(to)))
    )
