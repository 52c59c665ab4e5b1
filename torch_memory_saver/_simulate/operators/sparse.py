"""Operators of sparse tensors: the call copies the tensors to the host, computes there, and copies the results back.

So such a call waits for the device, and a capture refuses it, as most of CUDA's own do. Sparse tensors consist of ordinary
tensors on the device, so paused memory is noticed by the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_memory_saver._simulate.operators.devices import different_devices
from torch_memory_saver._simulate.operators.precision import lacks_types
from torch_memory_saver._simulate.operators.refusals import unsupported

__all__ = ["kernel_of", "operators"]

#: Maps the dispatch key of the device to the one of the host.
_KEYS = {"SparseCUDA": "SparseCPU", "SparseCsrCUDA": "SparseCsrCPU"}
#: Not replaced: they read or change metadata, allocate, copy, or call operators of the dense parts only.
_KEPT = frozenset(
    (
        "_coalesced_",
        "_dimI",
        "_dimV",
        "_indices",
        "_nnz",
        "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_values",
        "ccol_indices",
        "clone",
        "col_indices",
        "copy_",
        "copy_sparse_to_sparse_",
        "crow_indices",
        "dense_dim",
        "empty",
        "empty_like",
        "fill_",
        "indices",
        "is_coalesced",
        "is_pinned",
        "normal_",
        "permute",
        "resize_",
        "resize_as_sparse_",
        "row_indices",
        "select",
        "sparse_dim",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "unsqueeze",
        "values",
        "view_as_complex",
        "view_as_real",
        "zero_",
        "zeros",
    )
)


def operators() -> Iterator[tuple[Any, str]]:
    """Return the operators to replace, each with the dispatch key of the implementation for sparse tensors on the device."""
    for key in _KEYS:
        for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)):
            library, _, name = name.partition("::")
            packet, _, overload = name.partition(".")
            if library == "aten" and packet not in _KEPT:
                yield getattr(getattr(torch.ops.aten, packet), overload or "default"), key


def kernel_of(operator: Any, key: str) -> Callable[..., Any]:
    """Return the function to register as the implementation of the operator for a dispatch key of `operators`."""
    has_host_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), _KEYS[key])

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        if not has_host_kernel:
            raise NotImplementedError(
                f"{operator.name()} of sparse tensors has no CPU implementation, and the simulated GPU runs those: convert "
                "the tensors with to_dense(), or use a real GPU for this operator"
            )
        call = _Call(operator)
        return call.run(arguments, keywords)

    kernel.__name__ = operator.name()
    return kernel


class _Call:
    """The tensors of one call, on the device and on the host."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._device: torch.device | None = None
        #: Tensors on the device, each with its copy on the host.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        names = [each.name for each in self._operator._schema.arguments]
        given = dict(zip(names, arguments, strict=False)) | keywords
        host = {name: self._to_host(value) for name, value in given.items()}
        try:
            returned = self._operator(**host)
        except RuntimeError as error:
            if lacks_types(error):
                raise unsupported(error, self._operator, list(given.values())) from None
            raise
        for each in self._operator._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write and each.name in given:
                _write(given[each.name], host[each.name])
        return self._to_device(returned)

    def _to_host(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._to_host(each) for each in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and not value.dim()):
            return value
        if self._device is None:
            self._device = value.device
        if value.device != self._device:
            raise different_devices(self._device, value.device)
        copy = next((host for device, host in self._copies if device is value), None)
        if copy is None:
            copy = value.cpu()
            self._copies.append((value, copy))
        return copy

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple([self._to_device(each) for each in value])
        if not isinstance(value, torch.Tensor):
            return value
        given = next((device for device, host in self._copies if host is value), None)
        return given if given is not None else value.to(self._device)


def _write(device: torch.Tensor, host: torch.Tensor) -> None:
    """Give a tensor on the device the contents of the tensor on the host that an operator has written."""
    if host.layout == torch.strided:
        if device.shape != host.shape:
            device.resize_(host.shape)
    elif host.layout != torch.sparse_coo:
        host = host.to(device.device)
        device.resize_as_sparse_(host)
    device.copy_(host)
