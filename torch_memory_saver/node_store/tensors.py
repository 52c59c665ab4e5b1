"""The tensors and storages of a model: their description in a manifest, and the check that they can be published.

Only ordinary tensors on CUDA devices can be: their bytes are their storage's. A parameter counts as the tensor that it
holds, so the parameter classes of engines are accepted. Everything else is refused by name. This module changes nothing, and
keeps the storages that it has found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.saver import torch_memory_saver

__all__ = ["Found", "StorageShape", "TensorShape", "find"]

#: The kernel that computes fingerprints reads vectors of so many bytes.
VECTOR = 16


@dataclasses.dataclass(frozen=True)
class TensorShape:
    """The description of a tensor in a manifest.

    Attributes:
        dtype: Name of the type, such as ``torch.bfloat16``.
        shape: Sizes of the dimensions.
        strides: Strides of the dimensions, in elements.
        storage: Index of the storage. Tensors with the same one are tied.
        offset: First element in the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int


@dataclasses.dataclass(frozen=True)
class StorageShape:
    """The description of a storage in a manifest.

    Attributes:
        bytes: Size of the storage.
        aligned: Whether it begins at a vector of the kernel.
        device: Index of its device among those of the model, in the order in which they are found.
    """

    bytes: int
    aligned: bool
    device: int


@dataclasses.dataclass(frozen=True)
class Found:
    """The tensors of a model.

    Attributes:
        tensors: Tensors by name, sorted.
        shapes: Storages in the order of the first tensor that has them.
        storages: PyTorch's storages in the same order.
        devices: CUDA ordinals in the order in which they are found.
    """

    tensors: dict[str, TensorShape]
    shapes: list[StorageShape]
    storages: list[Any] = dataclasses.field(repr=False)  # PyTorch shows all bytes
    devices: list[int]


def find(torch: Any, model: Any, operation: str) -> Found:
    """Return the parameters and buffers of a module, or the tensors of a mapping.

    Raises:
        InvalidArgumentError: The object is neither, or a tensor cannot be published.
        InvalidStateError: A tensor is paused.
    """
    found = Found({}, [], [], [])
    indices: dict[int, int] = {}
    for name, tensor in sorted(_named(torch, model, operation).items()):
        reason = _why_not(torch, tensor)
        if reason:
            raise InvalidArgumentError(f"{operation}: '{name}' {reason}", operation=operation)
        if torch_memory_saver.is_paused(tensor):
            raise InvalidStateError(f"{operation}: '{name}' is paused: resume it first", operation=operation)
        storage = tensor.untyped_storage()
        index = indices.setdefault(storage._cdata, len(found.storages))
        if index == len(found.storages):
            ordinal = storage.device.index
            if ordinal not in found.devices:
                found.devices.append(ordinal)
            aligned = storage.data_ptr() % VECTOR == 0
            found.storages.append(storage)
            found.shapes.append(StorageShape(storage.nbytes(), aligned, found.devices.index(ordinal)))
        found.tensors[name] = TensorShape(
            str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), index, tensor.storage_offset()
        )
    return found


def _named(torch: Any, model: Any, operation: str) -> dict[str, Any]:
    if isinstance(model, torch.nn.Module):
        model = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    if not isinstance(model, Mapping):
        raise InvalidArgumentError(
            f"{operation} needs a module or a mapping from names to tensors, not {type(model).__name__}", operation=operation
        )
    for name, tensor in model.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{operation}: {name!r} is no name with a tensor", operation=operation)
    return {name: tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor for name, tensor in model.items()}


def _why_not(torch: Any, tensor: Any) -> str:
    """Return why a tensor cannot be published, or ""."""
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}: only ordinary tensors have all their bytes in one storage"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"has the layout {tensor.layout}: only dense tensors have all their bytes in one storage"
    if not tensor.is_cuda:
        return f"is on the device {tensor.device}: move it to a CUDA device first"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that conjugates or negates its storage: resolve it first"
    return ""
