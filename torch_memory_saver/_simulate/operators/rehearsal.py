"""The rehearsal of a call, which runs the CPU implementation on stand-ins for the device tensors.

PyTorch's meta implementations make fewer checks than the operators: for instance, they accept more argument types.
On the device this would be a stream error, after which the process can no longer use the device. A rehearsal finds the error
at the call. It runs once for each combination of shapes and types, before the description of the results is cached.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from torch_memory_saver._simulate.operators.precision import converts_halves, is_wider_on_cuda, lacks_types
from torch_memory_saver._simulate.operators.refusals import is_expanded, is_of_stand_ins, tensors_in, unsupported

__all__ = ["is_certain", "rehearse"]

#: A call with more elements in its arguments and results is rehearsed with smaller tensors.
_ELEMENTS = 1 << 16
#: The longest dimension of the smaller tensors, and the largest number among the other arguments: it may be a result's size.
_LENGTH = 8
_LARGEST_NUMBER = 256
#: Errors that do not depend on the lengths of dimensions: an error about a shape does.
_OF_ANY_LENGTH = re.compile(
    r"not implemented for|dtype|data type|scalar type|Dimension out of range|Expected (?!.* shape).* but got"
    r"|unsupported operation|ambiguous"
)

#: CUDA requires weights of the input's type. The CPU also accepts float32 weights with narrower inputs.
_OF_ONE_TYPE = frozenset(("native_group_norm", "native_layer_norm"))
#: Arguments with row numbers for LAPACK, which counts from one and does not check them.
_FROM_ONE = frozenset(("LU_pivots", "pivots"))
#: Operators that refuse a zero on the device only.
_OF_VALUES = frozenset(("_assert_async",))
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}


def rehearse(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result_elements: int) -> Exception | None:
    """Return the exception that the operator would raise, or None. The stand-ins' values may cause it; the caller has to
    check.

    Raises:
        NotImplementedError: The CPU implementation does not support the types of these tensors.
        RuntimeError: The CPU implementation refuses these types, or the CUDA implementation does.
    """
    described = operator._schema.arguments
    outputs = {each.name for each in described if each.is_out}
    given = dict(zip([each.name for each in described], arguments, strict=False)) | keywords
    tensors = tensors_in([value for name, value in given.items() if name not in outputs])
    base_name = operator._schema.name.removeprefix("aten::")
    if base_name in _OF_ONE_TYPE:
        _refuse_other_types(tensors)
    if base_name == "convolution":
        _refuse_other_weights(tensors)
    computed_otherwise = is_wider_on_cuda(operator, tensors) or converts_halves(operator, list(given.values()))
    if not (tensors or outputs) or computed_otherwise:
        return None
    if torch.Tag.nondeterministic_seeded in operator.tags and all(each.name != "generator" for each in described):
        return None  # a rehearsal would change the state of the program's generator
    whole = sum(each.numel() for each in tensors) + result_elements <= _ELEMENTS
    if not whole and any(number > _LARGEST_NUMBER for number in _numbers(list(given.values()))):
        return None
    from_one = base_name in _OF_VALUES
    stand_ins = {name: _stand_in(value, whole, int(from_one or name in _FROM_ONE)) for name, value in given.items()}
    for name in outputs & given.keys():
        if isinstance(given[name], torch.Tensor) and not is_expanded(given[name]):
            stand_ins[name] = torch.empty(0, dtype=given[name].dtype)
    if any(each.name == "generator" for each in described):
        stand_ins["generator"] = torch.Generator()
    try:
        operator(**stand_ins)
    except Exception as error:
        if is_of_stand_ins(error):
            return None
        if lacks_types(error):
            raise unsupported(error, operator, list(given.values())) from None
        return error if whole or is_certain(error) else None
    return None


def is_certain(error: Exception) -> bool:
    """Return whether an error that `rehearse` returned does not come from the values of the stand-ins."""
    return _OF_ANY_LENGTH.search(str(error)) is not None


def _refuse_other_types(tensors: list[torch.Tensor]) -> None:
    for other in tensors:
        if other.dtype != tensors[0].dtype:
            wanted, found = (_NAMES.get(each.dtype, str(each.dtype)) for each in (tensors[0], other))
            raise RuntimeError(f"expected scalar type {wanted} but found {found}")


def _refuse_other_weights(tensors: list[torch.Tensor]) -> None:
    values = tensors[0]
    for name, other in zip(("weight", "bias"), tensors[1:], strict=False):
        if other.dtype != values.dtype:
            raise RuntimeError(f"Input type ({values.type()}) and {name} type ({other.type()}) should be the same")


def _stand_in(value: Any, whole: bool, integer: int = 0) -> Any:
    """Return the argument with its tensors replaced: by ones, or in integer tensors by `integer`, which has to be a valid
    index. Expanded tensors stay expanded, because operators refuse to write to them."""
    if isinstance(value, torch.Tensor):
        number = 1 if value.is_floating_point() or value.is_complex() else integer
        size = value.shape if whole else [min(each, _LENGTH) for each in value.shape]
        made = torch.full(size, number, dtype=value.dtype)
        # The storage has room for all elements, so that an operator that checks nothing writes to no other memory.
        return made.as_strided(size, [own and step for own, step in zip(value.stride(), made.stride(), strict=True)])
    if isinstance(value, (list, tuple)):
        return [_stand_in(each, whole) for each in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _numbers(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [number for each in value for number in _numbers(each)] if isinstance(value, (list, tuple)) else []
