"""Normalisations: CUDA computes them in float32, and keeps the statistics so, where the CPU's keep the type of the input."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["COMPUTED_IN_FLOAT32", "in_float32"]

_HALF = (torch.bfloat16, torch.float16)

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


def in_float32(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """What the operator returns for arguments made wider. It may change them: the running statistics."""
    wide = [each.float() if isinstance(each, torch.Tensor) and each.dtype in _HALF else each for each in arguments]
    values = operator(*wide, **keywords)
    for given, used, described in zip(arguments, wide, operator._schema.arguments, strict=False):
        if given is not used and described.name.startswith("running_"):  # not all of the schemas say that it is written to
            given.copy_(used)
    return values
