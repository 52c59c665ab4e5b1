"""Operators that CUDA refuses under torch.use_deterministic_algorithms, because their kernels add in no fixed order.

The names in the messages are those of PyTorch's functions for CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["alert_of", "refuse"]

_Alert = Callable[[dict[str, Any]], bool]

_MESSAGE = "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True{})'. "
_ADVICE = (
    "You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable "
    "for your application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize "
    "adding deterministic support for this operation."
)
_ADVICE_OF_WARNING = (
    "You can file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic support "
    "for this operation."
)
_MAX = 2  # the mode of an embedding bag
_NO_REDUCTION = 0


def alert_of(operator: Any) -> tuple[str, _Alert] | None:
    """Return the name of the CUDA function, and whether it is refused for arguments, which are given by name. None: it never
    is."""
    return _ALERTS.get(operator._schema.name.removeprefix("aten::").removesuffix("_"))


def refuse(name: str) -> None:
    """Report that the CUDA function of this name is not deterministic.

    Raises:
        RuntimeError: The program wants an error rather than a warning.
    """
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(_MESSAGE.format(name, "") + _ADVICE)
    warnings.warn(_MESSAGE.format(name, ", warn_only=True") + _ADVICE_OF_WARNING, stacklevel=4)


def _always(given: dict[str, Any]) -> bool:
    return True


def _has_weights(given: dict[str, Any]) -> bool:
    return given.get("weights") is not None


def _has_fractions(given: dict[str, Any]) -> bool:
    kind = given.get("dtype") or given["self"].dtype
    return bool(kind.is_floating_point or kind.is_complex)


def _reduces(given: dict[str, Any]) -> bool:
    return bool(given.get("reduction", 1) != _NO_REDUCTION)


def _finds_maxima(given: dict[str, Any]) -> bool:
    return bool(given.get("mode") == _MAX)


def _returns_indices(given: dict[str, Any]) -> bool:
    return "dim" in given


def _multiplies(given: dict[str, Any]) -> bool:
    return bool(given.get("reduce") == "prod")


#: Maps an operator, without "_" and overload, to the CUDA function and the condition under which it is refused.
_ALERTS: dict[str, tuple[str, _Alert]] = {
    "_adaptive_avg_pool2d_backward": ("adaptive_avg_pool2d_backward_cuda", _always),
    "_adaptive_avg_pool3d_backward": ("adaptive_avg_pool3d_backward_cuda", _always),
    "_ctc_loss_backward": ("ctc_loss_backward_gpu", _always),
    "_embedding_bag_dense_backward": ("embedding_bag_backward_cuda_max", _finds_maxima),
    "_upsample_bicubic2d_aa_backward": ("upsample_bicubic2d_aa_backward_out_cuda", _always),
    "_upsample_bilinear2d_aa_backward": ("upsample_bilinear2d_aa_backward_out_cuda", _always),
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d_backward_cuda", _always),
    "avg_pool3d_backward": ("avg_pool3d_backward_cuda", _always),
    "bincount": ("_bincount_cuda", _has_weights),
    "cumsum": ("cumsum_cuda_kernel", _has_fractions),
    "fractional_max_pool2d_backward": ("fractional_max_pool2d_backward_cuda", _always),
    "fractional_max_pool3d_backward": ("fractional_max_pool3d_backward_cuda", _always),
    "grid_sampler_2d_backward": ("grid_sampler_2d_backward_cuda", _always),
    "grid_sampler_3d_backward": ("grid_sampler_3d_backward_cuda", _always),
    "histc": ("_histc_cuda with floating point input", _has_fractions),
    "max_pool3d_with_indices_backward": ("max_pool3d_with_indices_backward_cuda", _always),
    "max_unpool2d": ("max_unpooling2d_forward_out", _always),
    "max_unpool3d": ("max_unpooling3d_forward_out", _always),
    "median": ("median CUDA with indices output", _returns_indices),
    "nanmedian": ("median CUDA with indices output", _returns_indices),
    "nll_loss2d_forward": ("nll_loss2d_forward_out_cuda_template", _reduces),
    "put": ("put_", _always),
    "reflection_pad1d_backward": ("reflection_pad1d_backward_out_cuda", _always),
    "reflection_pad2d_backward": ("reflection_pad2d_backward_cuda", _always),
    "reflection_pad3d_backward": ("reflection_pad3d_backward_out_cuda", _always),
    "replication_pad1d_backward": ("replication_pad1d_backward_cuda", _always),
    "replication_pad2d_backward": ("replication_pad2d_backward_cuda", _always),
    "replication_pad3d_backward": ("replication_pad3d_backward_cuda", _always),
    "scatter_reduce": ("scatter_reduce_cuda_prod_", _multiplies),
    "upsample_bicubic2d_backward": ("upsample_bicubic2d_backward_out_cuda", _always),
    "upsample_bilinear2d_backward": ("upsample_bilinear2d_backward_out_cuda", _always),
    "upsample_linear1d_backward": ("upsample_linear1d_backward_out_cuda", _always),
    "upsample_trilinear3d_backward": ("upsample_trilinear3d_backward_out_cuda", _always),
}
