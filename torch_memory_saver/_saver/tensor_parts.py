"""The parts of tensors that have no storage of their own: subclasses made of other tensors, and sparse tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["add_storages", "parts_of"]


def parts_of(torch: Any, x: Any) -> list[Any] | None:
    """The tensors that a tensor of a subclass is made of; None for an ordinary one."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return None
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def add_storages(torch: Any, tensors: Iterable[Any], sizes: dict[int, int]) -> None:
    """Adds the storages on GPUs that the tensors have: address -> bytes. An ordinary tensor has one, others those of their
    parts. Empty storages are left out.

    The result is one dict of numbers, because thousands of new tuples would start Python's garbage collector.

    Raises:
        InvalidArgumentError: A tensor of a layout whose parts are not known.
    """
    ordinary, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for x in tensors:
        parts = None if type(x) in ordinary else parts_of(torch, x)
        if parts is not None:
            add_storages(torch, parts, sizes)
        elif x.is_cuda and x.layout is strided:
            storage = x.untyped_storage()
            size = storage.nbytes()
            if size:
                address = storage.data_ptr()
                sizes[address] = max(size, sizes.get(address, 0))
        elif x.is_cuda:
            add_storages(torch, _sparse_parts(torch, x), sizes)


def _sparse_parts(torch: Any, x: Any) -> tuple[Any, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    raise InvalidArgumentError(f"a tensor of layout {x.layout} has no known storages: pass the tensors that it is made of")
