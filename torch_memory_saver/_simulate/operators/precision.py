"""Operators that are computed in a wider type than that of their arguments.

Some are normalisations: CUDA computes them and stores their statistics in float32, while the CPU uses the type of the input.
Matrix products and convolutions of 16-bit floats are computed in float32 and rounded once, as on CUDA. The CPU has fast
kernels for these types only with certain instructions, and is otherwise a hundred times slower than in float32.
The others have a CUDA implementation for types that lack a CPU implementation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "COMPUTED_IN_FLOAT32",
    "convert_halves",
    "converts_halves",
    "in_float32",
    "in_wider_types",
    "is_product_of_halves",
    "is_wider_on_cuda",
    "lacks_types",
]

#: Messages for an unsupported type from operators that do not raise NotImplementedError.
_LACKING = r"not implemented for|support (tensors of type|complex|floating)|handles only|Unrecognized ScalarType"

_HALF = (torch.bfloat16, torch.float16)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
#: Converted to other types of their size without a change of their bits.
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_WIDER_REALS = dict.fromkeys(_HALF, torch.float32)
_WIDER_COMPLEX = {torch.complex32: torch.complex64}

#: Operators that support these types on CUDA but not on the CPU, according to PyTorch's OpInfo database.
_REALS = (
    "_upsample_bicubic2d_aa",
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward",
    "avg_pool3d",
    "avg_pool3d_backward",
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_backward",
    "multilabel_margin_loss_forward",
    "polygamma",
    "round",
    "rrelu_with_noise",
)
_COMPLEX = (
    "acos",
    "acosh",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "convolution",
    "convolution_backward",
    "cos",
    "cosh",
    "div",
    "exp",
    "lerp",
    "log",
    "logaddexp",
    "pow",
    "prod",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "sum",
    "tan",
    "tanh",
)
#: Types in which CUDA computes, by operator and argument type. In-place operators are listed without their "_".
_ON_CUDA: dict[str, dict[torch.dtype, torch.dtype]] = {
    **dict.fromkeys(_REALS, _WIDER_REALS),
    **dict.fromkeys(_COMPLEX, _WIDER_COMPLEX),
    **{name: {torch.float16: torch.float32, **_WIDER_COMPLEX} for name in ("_fft_c2c", "_fft_c2r", "_fft_r2c")},
    "abs": {torch.bool: torch.uint8},
    "gather": dict.fromkeys(_EIGHT_BITS, torch.uint8),
    "histc": dict.fromkeys(_WHOLE, torch.float64),
    "trace": {**_WIDER_REALS, **_WIDER_COMPLEX, torch.bool: torch.uint8},
}

COMPUTED_IN_FLOAT32 = frozenset(
    (
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit.no_stats",
        "aten::batch_norm_backward",
        "aten::native_batch_norm",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
    )
)
_PRODUCTS = frozenset(
    (
        "_addmm_activation",
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "convolution",
        "convolution_backward",
        "dot",
        "mm",
        "mv",
        "vdot",
    )
)


def in_float32(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Return the operator's return value for 16-bit float arguments converted to float32. The given running
    statistics are updated."""
    wide = [each.float() if isinstance(each, torch.Tensor) and each.dtype in _HALF else each for each in arguments]
    values = operator(*wide, **keywords)
    for given, used, described in zip(arguments, wide, operator._schema.arguments, strict=False):
        if given is not used and described.name.startswith("running_"):  # some schemas do not mark it as written
            given.copy_(used)
    return values


def is_product_of_halves(operator: Any, arguments: list[Any]) -> bool:
    """Return whether the operator is a product or a convolution of 16-bit floats. The operator itself refuses mixed
    types."""
    if _base_name(operator) not in _PRODUCTS:
        return False
    kinds = {each.dtype for each in arguments if isinstance(each, torch.Tensor)}
    return len(kinds) == 1 and kinds <= set(_HALF)


def converts_halves(operator: Any, arguments: Sequence[Any]) -> bool:
    """Return whether the operator is a softmax of 16-bit floats with a result in float32, or its backward. Only CUDA's
    kernels convert while they compute."""
    name = _base_name(operator)
    if name in ("_softmax", "_log_softmax"):
        return bool(arguments[2])
    return name in ("_softmax_backward_data", "_log_softmax_backward_data") and arguments[0].dtype != arguments[3]


def convert_halves(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Return the result of an operator for which `converts_halves` is true. An output argument receives it."""
    packet = getattr(torch.ops.aten, operator._schema.name.partition("::")[2])
    if len(packet.default._schema.arguments) == len(arguments) == 3:
        values = packet.default(arguments[0].float(), arguments[1], False)
    else:
        values = packet.default(*arguments[:3], torch.float32).to(arguments[3])
    return next(iter(keywords.values())).copy_(values) if keywords else values


def lacks_types(error: Exception) -> bool:
    """Return whether a CPU implementation raised this error because it does not support the types of its arguments."""
    return isinstance(error, NotImplementedError) or re.search(_LACKING, str(error)) is not None


def is_wider_on_cuda(operator: Any, tensors: list[torch.Tensor]) -> bool:
    """Return whether CUDA supports the type of one of these tensors for this operator and the CPU does not."""
    wider = _wider_types(operator)
    return any(each.dtype in wider for each in tensors)


def in_wider_types(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Return the operator's return value for arguments converted to wider types, converted back to the narrow types.
    Arguments that the operator writes receive the written values."""
    wider = _WIDER_REALS if is_product_of_halves(operator, [*arguments, *keywords.values()]) else _wider_types(operator)
    narrow: dict[torch.dtype, torch.dtype] = {}
    wide, named = _widen(arguments, wider, narrow), _widen(keywords, wider, narrow)
    values = operator(*wide, **named)
    names = [each.name for each in operator._schema.arguments]
    given, used = (
        dict(zip(names, arguments, strict=False)) | keywords,
        dict(zip(names, wide, strict=False)) | named,
    )
    for each in operator._schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write and used.get(each.name) is not given.get(each.name):
            given[each.name].resize_(used[each.name].shape).copy_(_narrow(used[each.name], narrow))
    return _narrow(values, narrow)


def _wider_types(operator: Any) -> dict[torch.dtype, torch.dtype]:
    name = operator._schema.name.removeprefix("aten::")
    return _ON_CUDA.get(name) or _ON_CUDA.get(_base_name(operator), {})


def _base_name(operator: Any) -> str:
    """Return the operator's name without its overload; that of an in-place operator without its "_"."""
    return str(operator._schema.name.removeprefix("aten::").removesuffix("_"))


def _widen(value: Any, wider: dict[torch.dtype, torch.dtype], narrow: dict[torch.dtype, torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in wider:
        narrow.setdefault(wider[value.dtype], value.dtype)
        return _converted(value, wider[value.dtype])
    if isinstance(value, torch.dtype):
        return wider.get(value, value)
    if isinstance(value, (list, tuple)):
        return [_widen(each, wider, narrow) for each in value]
    if isinstance(value, dict):
        return {name: _widen(each, wider, narrow) for name, each in value.items()}
    return value


def _narrow(value: Any, narrow: dict[torch.dtype, torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor):
        return _converted(value, narrow.get(value.dtype, value.dtype))
    if isinstance(value, (list, tuple)):
        return [_narrow(each, narrow) for each in value]
    return value


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype in _EIGHT_BITS or dtype in _EIGHT_BITS:
        return tensor.view(dtype)
    return tensor.to(dtype)
