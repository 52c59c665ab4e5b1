"""Which operators are replaced: those of the installed torch that have a CUDA implementation, with few exceptions."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "INDEXING",
    "NEVER_OF_THE_HOST",
    "SHAPED_AS_ON_CPU",
    "TAKES_HOST_TENSORS",
    "has_cpu_implementation",
    "of_quantised_tensors",
    "operators",
    "takes_host_numbers",
]

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

#: Arguments that are never numbers of the host, also where other arguments may be.
NEVER_OF_THE_HOST = frozenset(("index", "mask"))

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
        if packet in _KEPT or packet.startswith(_PREFIXES_KEPT + _MAKE_QUANTISED):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not _is_view(operator):
            yield operator


#: PyTorch's list of its own operators, which comes with it.
_LIST = Path("packaged", "ATen", "native", "native_functions.yaml")
_FOR_CUDA = re.compile(r"^  (?:structured_delegate:|  [\w, ]*\bCUDA\b)", re.MULTILINE)


_MAKE_QUANTISED = ("quantize_per_", "_make_per_")
#: What is left of the operators of quantised tensors: those that look at a description, allocate, or copy bytes.
_KEPT_OF_QUANTISED = (
    "_empty",
    "_reshape_alias",
    "clone",
    "empty",
    "q_",
    "qscheme",
    "set_",
    "squeeze",
    "unfold",
    "unsqueeze",
)


def of_quantised_tensors() -> Iterator[tuple[Any, str]]:
    """The operators that make quantised tensors or compute with them, each with the key of its CUDA implementation."""
    for key in ("CUDA", "QuantizedCUDA"):
        for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)):
            library, _, name = name.partition("::")
            packet, _, overload = name.partition(".")
            makes = packet.startswith(_MAKE_QUANTISED)
            if library != "aten" or not (makes or key == "QuantizedCUDA") or packet.startswith(_KEPT_OF_QUANTISED):
                continue
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if makes or not _is_view(operator):
                yield operator, key


def takes_host_numbers(operator: Any) -> bool:
    """Whether a tensor of the host without dimensions may be among an operator's arguments. PyTorch's CUDA implementations
    compare the devices of all arguments, but for those that are said to look at them themselves: most pointwise ones."""
    return operator.name().removeprefix("aten::") not in _comparing_devices()


@functools.cache
def _comparing_devices() -> frozenset[str]:
    """Empty where PyTorch does not come with its list."""
    generator = importlib.util.find_spec("torchgen")
    folders = generator.submodule_search_locations if generator is not None else None
    try:
        entries = Path((folders or [""])[0], _LIST).read_text().split("\n- func: ")
    except OSError:
        return frozenset()
    comparing = [each for each in entries if "device_check: NoCheck" not in each and _FOR_CUDA.search(each)]
    return frozenset(each[: each.index("(")] for each in comparing)


def has_cpu_implementation(operator: Any) -> bool:
    """Whether the device process can do it: by an implementation for the CPU, or for all devices."""
    found: bool = torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU")
    return found


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)
