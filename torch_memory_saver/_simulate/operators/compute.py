"""Run a CPU implementation with the results of CUDA's: in other types, and with integers divided by zero."""

from __future__ import annotations

from typing import Any

import torch

from torch_memory_saver._simulate.operators.precision import (
    COMPUTED_IN_FLOAT32,
    convert_halves,
    converts_halves,
    in_float32,
    in_wider_types,
    is_product_of_halves,
    is_wider_on_cuda,
    lacks_types,
)
from torch_memory_saver._simulate.operators.refusals import tensors_in

__all__ = ["compute", "writes_results"]

#: Operators that divide. The CPU raises an error for integers divided by zero; on CUDA the quotient is undefined.
_DIVIDING = frozenset(("div", "floor_divide", "fmod", "remainder"))


def compute(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Return the result of an operator that CUDA accepts."""
    if operator.name() in COMPUTED_IN_FLOAT32:
        return in_float32(operator, arguments, keywords)
    if converts_halves(operator, arguments):
        return convert_halves(operator, arguments, keywords)
    if is_product_of_halves(operator, arguments):
        return in_wider_types(operator, arguments, keywords)
    if _divides_integers(operator, arguments, keywords) and (by_zero := _zeros(arguments[1])).any():
        return _divide(operator, arguments, keywords, by_zero)
    try:
        return operator(*arguments, **keywords)
    except RuntimeError as error:
        if not lacks_types(error) or not is_wider_on_cuda(operator, tensors_in([*arguments, *keywords.values()])):
            raise
        return in_wider_types(operator, arguments, keywords)


def writes_results(operator: Any, arguments: list[Any]) -> bool:
    """Return whether the operator's out= overload computes the same as `compute` for these arguments."""
    converts = converts_halves(operator, arguments) or is_product_of_halves(operator, arguments)
    return operator.name() not in COMPUTED_IN_FLOAT32 and not converts


def _divides_integers(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> bool:
    name = operator._schema.name.removeprefix("aten::").removesuffix("_")
    if name not in _DIVIDING or (name == "div" and keywords.get("rounding_mode") is None):
        return False
    kind = torch.result_type(arguments[0], arguments[1])
    return not kind.is_floating_point and not kind.is_complex


def _zeros(divisor: Any) -> torch.Tensor:
    return divisor == 0 if isinstance(divisor, torch.Tensor) else torch.tensor(divisor == 0)


def _divide(operator: Any, arguments: list[Any], keywords: dict[str, Any], by_zero: torch.Tensor) -> torch.Tensor:
    """Divide integers. Where the divisor is zero, the quotient is a number with all bits set."""
    dividend, divisor, *others = arguments
    divisor = divisor.masked_fill(by_zero, 1) if isinstance(divisor, torch.Tensor) else 1
    quotients: torch.Tensor = operator(dividend, divisor, *others, **keywords)
    return quotients.copy_(torch.where(by_zero, torch.zeros_like(quotients).bitwise_not(), quotients))
