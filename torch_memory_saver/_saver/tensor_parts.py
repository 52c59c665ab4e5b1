"""The parts of tensors that have no storage of their own: subclasses made of other tensors, and sparse tensors."""

from __future__ import annotations

from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["parts_of", "storages_of"]


def parts_of(torch: Any, x: Any) -> list[Any] | None:
    """The tensors that a tensor of a subclass is made of; None for an ordinary one."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return None
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def storages_of(torch: Any, x: Any) -> list[Any]:
    """The storages on GPUs of a tensor: one for an ordinary tensor, those of its parts for others, none on other devices.

    Raises:
        InvalidArgumentError: A tensor of a layout whose parts are not known.
    """
    if type(x) is not torch.Tensor:
        parts = parts_of(torch, x)
        if parts is not None:
            return [storage for part in parts for storage in storages_of(torch, part)]
    if not x.is_cuda:
        return []
    if x.layout is torch.strided:
        return [x.untyped_storage()]
    return [storage for part in _sparse_parts(torch, x) for storage in storages_of(torch, part)]


def _sparse_parts(torch: Any, x: Any) -> tuple[Any, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    raise InvalidArgumentError(f"a tensor of layout {x.layout} has no known storages: pass the tensors that it is made of")
