"""The operators of a batch normalisation over several processes (torch.nn.SyncBatchNorm), which have no CPU implementation.

They are composed of other operators. Statistics are per channel, which is dimension 1. Statistics of 16-bit floats have
type float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["COMPOSED"]

_Tensor: TypeAlias = torch.Tensor
_Optional: TypeAlias = torch.Tensor | None


def _wide(tensor: _Tensor) -> _Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(tensor: _Tensor) -> list[int]:
    return [place for place in range(tensor.dim()) if place != 1]


def _per_channel(statistics: _Tensor, like: _Tensor) -> _Tensor:
    """Return statistics in a shape that can be combined with a tensor with channels."""
    return statistics.view([-1 if place == 1 else 1 for place in range(like.dim())])


def _stats(values: _Tensor, eps: float) -> tuple[_Tensor, _Tensor]:
    variance, mean = torch.var_mean(_wide(values), _all_but_channels(values), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather(
    values: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    running_mean: _Optional,
    running_var: _Optional,
    momentum: float,
    eps: float,
    counts: _Tensor,
) -> tuple[_Tensor, _Tensor]:
    """Combine the statistics of several processes, one a row, and update the running ones."""
    weights = counts.to(mean.dtype)[:, None]
    total = weights.sum()
    common = (mean * weights).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - common) ** 2) * weights).sum(0)
    for running, latest in ((running_mean, common), (running_var, squares / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(latest.to(running.dtype), alpha=momentum)
    return common, (squares / total + eps).rsqrt()


def _gather_equal(
    values: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    running_mean: _Optional,
    running_var: _Optional,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[_Tensor, _Tensor]:
    counts = torch.full((mean.shape[0],), count, dtype=mean.dtype, device=mean.device)
    return _gather(values, mean, invstd, running_mean, running_var, momentum, eps, counts)


def _normalise(
    values: _Tensor, weight: _Optional, bias: _Optional, mean: _Tensor, invstd: _Tensor, eps: float, out: _Optional = None
) -> _Tensor:
    made = (_wide(values) - _per_channel(mean, values)) * _per_channel(invstd, values)
    if weight is not None:
        made = made * _per_channel(_wide(weight), values)
    if bias is not None:
        made = made + _per_channel(_wide(bias), values)
    made = made.to(values.dtype)
    return made if out is None else out.resize_(made.shape).copy_(made)


def _reduce_backward(
    grad_out: _Tensor,
    values: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Optional,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[_Optional, _Optional, _Optional, _Optional]:
    others = _all_but_channels(values)
    sum_dy = _wide(grad_out).sum(others)
    sum_dy_xmu = (_wide(grad_out) * (_wide(values) - _per_channel(mean, values))).sum(others)
    kind = values.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(kind) if weight_g else None,
        sum_dy.to(kind) if bias_g else None,
    )


def _backward(
    grad_out: _Tensor,
    values: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Optional,
    sum_dy: _Tensor,
    sum_dy_xmu: _Tensor,
    count: _Tensor,
) -> _Tensor:
    total = count.sum()
    scale = invstd if weight is None else invstd * _wide(weight)
    slope = invstd**2 * (sum_dy_xmu / total)
    centred = _wide(values) - _per_channel(mean, values)
    made = _wide(grad_out) - _per_channel(sum_dy / total, values) - centred * _per_channel(slope, values)
    return (made * _per_channel(scale, values)).to(values.dtype)


#: Maps operators to their implementations.
COMPOSED: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats": _gather_equal,
    "aten::batch_norm_gather_stats_with_counts": _gather,
    "aten::batch_norm_elemt": _normalise,
    "aten::batch_norm_elemt.out": _normalise,
    "aten::batch_norm_backward_reduce": _reduce_backward,
    "aten::batch_norm_backward_elemt": _backward,
}
