"""Determine what an operator returns without running it: PyTorch's meta implementations compute shapes and types.

They also make many of the operator's checks, with the same messages. A call takes 0.1 ms, so the results are cached. The key
contains everything that they depend on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from torch_memory_saver._simulate.operators import rehearsal
from torch_memory_saver._simulate.operators.cuda_types import refuse_types
from torch_memory_saver._simulate.operators.refusals import (
    refuse_overlaps,
    refuses_overlaps,
    to_one_element,
    try_types,
)
from torch_memory_saver._simulate.operators.table import SHAPED_AS_ON_CPU, functional

__all__ = ["DependsOnValues", "Doubted", "Refused", "Result", "clear", "infer"]

_REMEMBERED = 20_000


class DependsOnValues(Exception):
    """The description of the results depends on values, or PyTorch cannot compute it. The operator has to be run."""


class Refused(Exception):
    """A meta implementation raised an error, the __cause__ of this one. The operator may raise another error or none."""


class Doubted(Refused):
    """A rehearsal raised an error, the __cause__ of this one."""

    def __init__(self, key: Any, returned: Any, certain: bool) -> None:
        """Set the fields. `certain`: the stand-ins' values cannot be the reason. `returned`: what infer would return."""
        super().__init__(key, returned)
        self.returned, self.certain = returned, certain
        self._key = key

    def forget(self) -> None:
        """Cache the results without the error, for callers whose operator has accepted the arguments."""
        _remember(self._key, self.returned)


class Result(NamedTuple):
    """One tensor that an operator returns."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_known: OrderedDict[Any, Any] = OrderedDict()
#: Not None, which some operators return.
_UNKNOWN = object()


def clear() -> None:
    """Empty the cache."""
    _known.clear()


def infer(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the operator's return value with a Result in place of each tensor. A returned argument is described as it is
    after the call.

    Raises:
        DependsOnValues: The operator has to be run to find out.
        Refused: A meta implementation raised an error.
        Doubted: A rehearsal raised an error.
        Exception: The operator refuses the arguments.
    """
    key = (operator, torch.get_default_dtype(), _key(arguments), _key(keywords), _overlaps(arguments, keywords))
    try:
        found = _known.get(key, _UNKNOWN)
    except TypeError:  # an argument is not hashable
        return _compute(operator, arguments, keywords)
    if found is _UNKNOWN:
        found = _compute(operator, arguments, keywords)
        error = rehearsal.rehearse(operator, arguments, keywords, _elements(found))
        if error is not None:
            raise Doubted(key, found, rehearsal.is_certain(error)) from error
        _remember(key, found)
    return found


def _remember(key: Any, found: Any) -> None:
    _known[key] = found
    if len(_known) > _REMEMBERED:
        _known.popitem(last=False)


def _elements(found: Any) -> int:
    """Return the number of elements of all returned tensors."""
    if isinstance(found, Result):
        return math.prod(found.size)
    return sum(map(_elements, found)) if isinstance(found, list) else 0


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        contents = value.item() if value.device.type == "cpu" and value.dim() == 0 else None
        return (value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg(), contents)
    if isinstance(value, (list, tuple)):
        return tuple([_key(each) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _key(each)) for name, each in value.items()])
    # 1, 1.0 and True compare equal but give results of different types.
    return value if value is None else (type(value), value)


def _overlaps(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Return for each tensor the first tensor with the same storage, and the offset in it; () if no storage is shared. The
    key includes this because operators refuse some overlaps."""
    tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage().data_ptr() for each in tensors]
    if len(set(storages)) == len(storages):
        return ()
    return tuple([(storages.index(at), each.storage_offset()) for at, each in zip(storages, tensors, strict=True)])


def _compute(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    refuse_types(operator, arguments, keywords)
    if operator._schema.name.startswith("aten::_foreach_"):
        return _compute_of_lists(operator, arguments, keywords)
    if operator.name() in SHAPED_AS_ON_CPU:
        return _run_on_blanks(operator, arguments, keywords)
    if refuses_overlaps(operator):
        refuse_overlaps(operator, arguments, keywords)
    if torch.Tag.pointwise not in operator.tags:
        return _compute_with_outputs(operator, arguments, keywords)
    small = try_types(operator, arguments, keywords)
    found = _compute_with_outputs(operator, arguments, keywords)
    return found._replace(dtype=small.dtype) if _is_tensor(small) and isinstance(found, Result) else found


def _run_on_blanks(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the results of the CPU's implementation for tensors of the same shapes and strides, whose integers are
    zeros."""
    try:
        return _describe(operator(*_blank(arguments), **_blank(keywords)))
    except Exception as error:
        raise Refused from error


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)  # of a large one, only what is read costs
        return made if made.is_floating_point() else made.zero_()
    if isinstance(value, (list, tuple)):
        return [_blank(each) for each in value]
    return {name: _blank(each) for name, each in value.items()} if isinstance(value, dict) else value


def _compute_with_outputs(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    outputs = {each.name for each in operator._schema.arguments if each.is_out and each.name in keywords}
    if outputs and not _have_sizes(outputs, keywords, found := _ask_meta(operator, arguments, _emptied(outputs, keywords))):
        return _as_if_returned(operator, arguments, keywords, outputs, found)  # the caller resizes them, with a warning
    return _ask_meta(operator, arguments, keywords)


def _as_if_returned(
    operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], outputs: set[str], found: Any
) -> Any:
    """Return `found`, the description of out= tensors that are resized, with the strides of new results: operators choose
    both alike, but meta implementations lay out an out= tensor without gaps."""
    other = functional(operator)
    if other is None:
        return found
    try:
        new = _ask_meta(other, arguments, {name: value for name, value in keywords.items() if name not in outputs})
    except (DependsOnValues, Refused):
        return found
    return _with_strides(found, new)


def _with_strides(found: Any, new: Any) -> Any:
    if isinstance(found, list) and isinstance(new, list):
        return [_with_strides(*each) for each in zip(found, new, strict=True)]
    same = isinstance(found, Result) and isinstance(new, Result) and found.size == new.size
    return found._replace(stride=new.stride) if same else found


def _ask_meta(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    storages: dict[int, torch.Tensor] = {}
    try:
        returned = operator(*_to_meta(arguments, storages), **_to_meta(keywords, storages))
    except NotImplementedError as error:
        raise DependsOnValues(str(error)) from error
    except Exception as error:
        raise Refused from error
    return _describe(returned)


def _emptied(outputs: set[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with empty tensors in place of the out= tensors. Every operator can resize an empty
    tensor."""
    empty = {
        each: torch.empty(0, dtype=keywords[each].dtype, device="meta") for each in outputs if _is_tensor(keywords[each])
    }
    return keywords | empty


def _have_sizes(outputs: set[str], keywords: dict[str, Any], expected: Any) -> bool:
    """Return whether the out= tensors have the expected sizes."""
    sizes = [each.size for each in (expected if isinstance(expected, list) else [expected]) if isinstance(each, Result)]
    return sizes == [tuple(each.shape) for name, each in keywords.items() if name in outputs and _is_tensor(each)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _compute_of_lists(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the results of a foreach operator, which has no meta implementation. Their shapes are those of the lists'
    tensors after broadcasting. Their types come from a run with one element of each tensor."""
    small = operator(*to_one_element(arguments), **to_one_element(keywords))
    if small is None:  # an in-place operator
        return None
    if not isinstance(small, (list, tuple)):
        raise DependsOnValues(operator._schema.name)
    described = []
    lists = [each for each in arguments if isinstance(each, (list, tuple)) and each and _is_tensor(each[0])]
    for tensor, *tensors in zip(small, *lists, strict=True):
        like = tensors[0]
        shape = tuple(torch.broadcast_shapes(*[each.shape for each in tensors]))
        if shape == tuple(like.shape):
            dense = torch.empty_like(_meta(like, {}), dtype=tensor.dtype)
        else:
            dense = torch.empty(shape, dtype=tensor.dtype, device="meta")
        size = () if tensor.dim() < len(shape) else shape  # norms reduce
        described.append(Result(size, tuple(dense.stride()) if size else (), tensor.dtype))
    return described


def _meta(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the tensor on the meta device. Tensors that share a storage share one there too, so that overlaps are
    detected."""
    address = tensor.untyped_storage().data_ptr()
    size = tensor.untyped_storage().nbytes()
    if not address or not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    base = storages.get(address)
    if base is None:
        base = storages[address] = torch.empty(size, dtype=torch.uint8, device="meta")
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    made.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = torch._conj(made)
    return torch._neg_view(made) if tensor.is_neg() else made


def _to_meta(value: Any, storages: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.device.type == "meta" or not (value.device.type == "cuda" or value.dim())
            else _meta(value, storages)
        )
    if isinstance(value, (list, tuple)):
        return [_to_meta(each, storages) for each in value]
    if isinstance(value, dict):
        return {name: _to_meta(each, storages) for name, each in value.items()}
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Result(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_describe(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DependsOnValues(f"the return value is a {type(value).__name__}")
