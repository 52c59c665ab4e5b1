"""Types of arguments that CUDA's implementation of an operator lacks and the CPU's has: they are refused here too.

The operators and types are those that differ in PyTorch's database of operators, OpInfo (tests/torch/test_operators_types.py
compares), and those that a real GPU refused (tests/conformance/pytorch). The names of kernels are known for the latter only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["refuse_types"]

_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_WHOLE = _INTEGERS | {torch.bool}
_HALVES = frozenset((torch.float16, torch.bfloat16))
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_EIGHT_BITS = frozenset(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
)
_ALL = _WHOLE | _HALVES | _COMPLEX | _EIGHT_BITS | {torch.float32, torch.float64}


class _Lack(NamedTuple):
    """Types that CUDA lacks.

    Attributes:
        types: The types.
        message: The name of CUDA's kernel, or a whole message in which {} stands for the type.
        argument: The argument that has the type; empty for the first tensor.
        error: The class of CUDA's exception.
    """

    types: frozenset[torch.dtype]
    message: str
    argument: str = ""
    error: type[Exception] = NotImplementedError


def _cudnn(types: frozenset[torch.dtype], message: str) -> _Lack:
    return _Lack(types, message, error=RuntimeError)


_NO_TYPE = "getCudnnDataTypeFromScalarType() not supported for {}"
_NO_ENGINE = "GET was unable to find an engine to execute this computation"
_IN_CUDNN = frozenset((torch.uint8, torch.int8, torch.int32))

#: Operators -> what CUDA lacks for them. In-place operators are listed without their "_".
_GROUPS: dict[tuple[str, ...], tuple[_Lack, ...]] = {
    ("mm", "addmm", "_addmm_activation"): (_Lack(_WHOLE | _EIGHT_BITS, "addmm_cuda"),),
    ("bmm", "baddbmm", "addbmm"): (_Lack(_WHOLE | _EIGHT_BITS, "baddbmm_cuda"),),
    ("addmv",): (_Lack(_WHOLE | _EIGHT_BITS, "addmv_impl_cuda"),),
    ("dot", "vdot"): (_Lack(_WHOLE | _EIGHT_BITS, "dot"),),
    ("convolution",): (_cudnn(_IN_CUDNN, _NO_ENGINE), _cudnn((_WHOLE | _EIGHT_BITS) - _IN_CUDNN, _NO_TYPE)),
    ("avg_pool2d",): (_Lack(_WHOLE, "avg_pool2d_out_cuda_frame"),),
    ("avg_pool3d",): (_Lack(_WHOLE, "avg_pool3d_out_frame"),),
    ("max_pool2d_with_indices",): (_Lack(_WHOLE, "max_pool2d_with_indices_out_cuda_frame"),),
    ("max_pool3d_with_indices",): (_Lack(_WHOLE, "max_pool3d_with_indices_out_frame"),),
    ("_upsample_bilinear2d_aa",): (_Lack(_WHOLE, "upsample_bilinear2d_out_frame"),),
    ("upsample_bilinear2d",): (_Lack(_WHOLE, "upsample_bilinear2d_out_frame"),),
    ("upsample_bicubic2d",): (_Lack(_WHOLE, "upsample_bicubic2d_out_frame"),),
    ("histc",): (
        _Lack(frozenset((torch.float16,)), "HalfTensor is not supported", error=RuntimeError),
        _Lack(frozenset((torch.bfloat16,)), "histc"),
    ),
    ("igamma", "igammac"): (_Lack(_HALVES, "igamma_cuda"),),
    ("abs",): (_Lack(_EIGHT_BITS, "abs_cuda"),),
    ("masked_fill",): (
        _Lack(_ALL - {torch.bool}, "masked_fill only supports boolean masks, but got dtype {}", "mask", RuntimeError),
    ),
    ("native_dropout",): (_Lack(_WHOLE | _COMPLEX | _EIGHT_BITS, "fused_dropout"),),
    ("native_dropout_backward",): (_Lack(_WHOLE, "masked_scale"),),
    ("std", "std_mean", "var", "var_mean"): (_Lack(_EIGHT_BITS, "std_cuda"),),
    ("nll_loss_forward",): (
        _Lack(_WHOLE - {torch.uint8, torch.int64}, "nll_loss_forward_reduce_cuda_kernel_2d_index", "target"),
    ),
}
_LACKS = {name: lacks for names, lacks in _GROUPS.items() for name in names}

_NAMES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def refuse_types(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Check the types of the arguments.

    Raises:
        NotImplementedError: The operator does not support a type on CUDA.
        RuntimeError: The operator does not support a type on CUDA and reports this with a RuntimeError.
    """
    name = operator._schema.name.removeprefix("aten::")
    for lack in _LACKS.get(name) or _LACKS.get(name.removesuffix("_"), ()):
        tensor = _argument(operator, lack.argument, arguments, keywords)
        if isinstance(tensor, torch.Tensor) and tensor.dtype in lack.types and tensor.numel():
            kind = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.").capitalize())
            message = (
                lack.message if lack.error is not NotImplementedError else f"\"{lack.message}\" not implemented for '{{}}'"
            )
            raise lack.error(message.replace("{}", kind))


def _argument(operator: Any, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    for place, each in enumerate(operator._schema.arguments):
        value = arguments[place] if place < len(arguments) else keywords.get(each.name)
        if each.name == name or (not name and isinstance(value, torch.Tensor)):
            return value
    return None
