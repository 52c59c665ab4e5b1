"""The parts of tensors that have no storage of their own: subclasses made of other tensors, and sparse tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["add_storages", "parts_of"]

#: Fewer than the 700 new objects that start a garbage collection.
_STORAGES_AT_ONCE = 256


def parts_of(torch: Any, x: Any) -> list[Any] | None:
    """The tensors that a tensor of a subclass is made of; None for an ordinary one."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return None
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def add_storages(torch: Any, tensors: Iterable[Any], sizes: dict[int, int]) -> None:
    """Adds the storages on GPUs that the tensors have: address -> bytes. An ordinary tensor has one, others those of their
    parts. Empty storages are left out.

    A pause calls this for thousands of tensors. So there is no loop in Python over ordinary ones, and few objects live at
    once: many new ones would start Python's garbage collector.

    Raises:
        InvalidArgumentError: A tensor of a layout whose parts are not known.
    """
    ordinary, strided, tensors = (torch.Tensor, torch.nn.Parameter), torch.strided, list(tensors)
    simple = [x for x in tensors if type(x) in ordinary and x.layout is strided and x.is_cuda]
    for x in tensors if len(simple) < len(tensors) else ():
        parts = None if type(x) in ordinary else parts_of(torch, x)
        if parts is not None:
            add_storages(torch, parts, sizes)
        elif x.is_cuda and x.layout is not strided:
            add_storages(torch, _sparse_parts(torch, x), sizes)
        elif x.is_cuda and type(x) not in ordinary:
            simple.append(x)
    for first in range(0, len(simple), _STORAGES_AT_ONCE):
        _add_simple(torch, simple[first : first + _STORAGES_AT_ONCE], sizes)


def _add_simple(torch: Any, tensors: list[Any], sizes: dict[int, int]) -> None:
    """The same for tensors that have a storage of their own."""
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    addresses = list(map(torch.UntypedStorage.data_ptr, storages))
    larger = map(max, map(torch.UntypedStorage.nbytes, storages), map(sizes.get, addresses, repeat(0)))
    sizes.update(zip(addresses, larger, strict=True))
    for address in [address for address in addresses if not sizes[address]]:
        sizes.pop(address, None)


def _sparse_parts(torch: Any, x: Any) -> tuple[Any, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    raise InvalidArgumentError(f"a tensor of layout {x.layout} has no known storages: pass the tensors that it is made of")
