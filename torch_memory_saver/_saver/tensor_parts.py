"""The parts of tensors that have no storage of their own: subclasses made of other tensors, and sparse tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["add_extents", "parts_of", "storages_of"]

#: Fewer than the 700 new objects that start a garbage collection.
_STORAGES_AT_ONCE = 256


def parts_of(torch: Any, x: Any) -> list[Any] | None:
    """The tensors that a tensor of a subclass is made of; None for an ordinary one."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return None
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def storages_of(torch: Any, tensors: Sequence[Any]) -> Iterator[Any]:
    """The storages that the tensors have: an ordinary tensor has one, others those of their parts.

    A pause calls this for thousands of tensors. So there is no loop in Python over ordinary ones.

    Raises:
        InvalidArgumentError: A tensor of a layout whose parts are not known.
    """
    ordinary = {torch.Tensor, torch.nn.Parameter}
    if not ordinary.issuperset(map(type, tensors)) or set(map(torch.Tensor.layout.__get__, tensors)) - {torch.strided}:
        tensors = list(_with_storages(torch, tensors, ordinary))
    return map(torch.Tensor.untyped_storage, tensors)


def add_extents(torch: Any, storages: Iterable[Any], sizes: dict[int, int]) -> None:
    """Adds where storages lie: address -> bytes. Empty storages are left out. Storages on the CPU may be among them: no
    device memory has their addresses.

    Consumes the iterable in small portions, so that few storages live at once: many new objects would start Python's garbage
    collector.
    """
    remaining = iter(storages)
    addresses: list[int] = []
    lengths: list[int] = []
    while portion := list(islice(remaining, _STORAGES_AT_ONCE)):
        addresses.extend(map(torch.UntypedStorage.data_ptr, portion))
        lengths.extend(map(torch.UntypedStorage.nbytes, portion))
    added = dict(zip(addresses, lengths, strict=True))
    if sizes or len(added) < len(addresses):  # the largest of those with the same address
        larger = map(max, lengths, map(sizes.get, addresses, repeat(0)))
        sizes.update(zip(addresses, larger, strict=True))
    else:
        sizes.update(added)
    if 0 in sizes.values():
        for address in [address for address, length in sizes.items() if not length]:
            del sizes[address]


def _with_storages(torch: Any, tensors: Iterable[Any], ordinary: Container[type]) -> Iterator[Any]:
    """The tensors with a storage of their own that these are, or are made of."""
    for x in tensors:
        parts = None if type(x) in ordinary else parts_of(torch, x)
        if parts is not None:
            yield from _with_storages(torch, parts, ordinary)
        elif x.layout is torch.strided:
            yield x
        elif x.is_cuda:
            yield from _sparse_parts(torch, x)


def _sparse_parts(torch: Any, x: Any) -> tuple[Any, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    raise InvalidArgumentError(f"a tensor of layout {x.layout} has no known storages: pass the tensors that it is made of")
