"""Which operators are replaced: those of the installed torch that have a CUDA implementation, with few exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["INDEXING", "SHAPED_AS_ON_CPU", "TAKES_HOST_TENSORS", "has_cpu_implementation", "operators"]

#: The CPU's implementation returns other shapes than CUDA's, and its backward wants those; or the meta implementation does.
SHAPED_AS_ON_CPU = frozenset(
    ("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::multilabel_margin_loss_forward")
)

#: Their results have shapes that depend on values only where they are indexed by masks.
INDEXING = frozenset(("aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"))

#: Tensors of the host may be among their arguments: indices and lengths. Others take none with dimensions.
TAKES_HOST_TENSORS = frozenset(
    (
        "aten::_ctc_loss",
        "aten::_ctc_loss_backward",
        "aten::_foreach_addcdiv",
        "aten::_foreach_addcdiv_",
        "aten::_foreach_addcmul",
        "aten::_foreach_addcmul_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index",
        "aten::_unsafe_index_put",
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
    )
)

#: They allocate, name storage or look at a tensor's description; or PyTorch's own implementation needs only copies and
#: fills.
_KEPT = frozenset(
    (
        "_copy_from",
        "_copy_from_and_resize",
        "_cudnn_init_dropout_state",
        "_dimI",
        "_dimV",
        "_efficientzerotensor",
        "_fused_sdp_choice",
        "_local_scalar_dense",
        "_pin_memory",
        "_use_cudnn_ctc_loss",
        "_use_miopen_ctc_loss",
        "copy_",
        "empty",
        "empty_strided",
        "is_pinned",
        "is_set_to",
        "record_stream",
        "resize_",
        "set_",
        "zero_",
    )
)
#: They reach a CUDA implementation without having one by name.
_ADDED = (
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_index_put_impl_",
    "aten::mode.values",
    "aten::nanmean.out",  # in PyTorch 2.6
)
_PREFIXES_KEPT = ("cudnn_", "_cudnn_", "miopen_", "mkldnn_", "_mps_", "_nested_", "_coalesced", "_sparse", "_to_sparse")


def operators() -> Iterator[Any]:
    """The operators to replace, each as torch.ops has it."""
    names = {name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if name.startswith("aten::")}
    for name in sorted(names | set(_ADDED)):
        packet, _, overload = name.partition("::")[2].partition(".")
        if packet in _KEPT or packet.startswith(_PREFIXES_KEPT):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not _is_view(operator):
            yield operator


def has_cpu_implementation(operator: Any) -> bool:
    """Whether the device process can do it: by an implementation for the CPU, or for all devices."""
    found: bool = torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU")
    return found


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)
