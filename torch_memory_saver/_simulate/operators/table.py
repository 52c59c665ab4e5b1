"""The operators to replace: those of the installed torch that have a CUDA implementation, with few exceptions."""

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
    "SHAPED_AS_ON_CPU",
    "TAKES_HOST_TENSORS",
    "USES_CUBLAS",
    "functional",
    "has_cpu_implementation",
    "of_quantised_tensors",
    "operators",
    "takes_host_numbers",
]

#: The CPU implementation returns other shapes than CUDA's and its backward requires them, or the meta implementation returns
#: other shapes.
SHAPED_AS_ON_CPU = frozenset(
    ("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::multilabel_margin_loss_forward")
)

#: The shapes of the results depend on values only if an index is a mask.
INDEXING = frozenset(("aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"))

#: Operators that accept host tensors, for indices and lengths. Others accept at most host tensors without dimensions.
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

#: Operators that compute with cuBLAS on a GPU, and so access the workspace of their thread and stream.
USES_CUBLAS = frozenset(
    (
        "_addmm_activation",
        "_int_mm",
        "_scaled_mm",
        "addmm",
        "addmm_",
        "addmv",
        "addmv_",
        "baddbmm",
        "baddbmm_",
        "bmm",
        "dot",
        "linalg_solve_triangular",
        "mm",
        "triangular_solve",
        "vdot",
    )
)

#: Not replaced, or elsewhere (special.py). They allocate, change the storage or read the metadata of a tensor, or PyTorch's
#: own implementation needs only copies, fills and other operators.
_KEPT = frozenset(
    (
        "_copy_from",
        "_copy_from_and_resize",
        "_cudnn_init_dropout_state",
        "_dimI",
        "_dimV",
        "_efficientzerotensor",
        "_embedding_bag_backward",
        "_fused_sdp_choice",
        "_local_scalar_dense",
        "_pin_memory",
        "_use_cudnn_ctc_loss",
        "_use_miopen_ctc_loss",
        "copy_",
        "empty",
        "empty_strided",
        "equal",
        "is_pinned",
        "is_set_to",
        "record_stream",
        "resize_",
        "set_",
        "zero_",
    )
)
#: They have a CUDA implementation that is not registered under their name.
_ADDED = (
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_index_put_impl_",
    "aten::mode.values",
    "aten::nanmean.out",  # in PyTorch 2.8
)
#: Replaced although their names begin with one of _PREFIXES_KEPT.
_REPLACED = frozenset(("cudnn_convolution", "cudnn_convolution_transpose"))
_PREFIXES_KEPT = ("cudnn_", "_cudnn_", "miopen_", "mkldnn_", "_mps_", "_nested_", "_coalesced", "_sparse", "_to_sparse")


def operators() -> Iterator[Any]:
    """Return the operators to replace, as objects of torch.ops."""
    names = {name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if name.startswith("aten::")}
    for name in sorted(names | set(_ADDED)):
        packet, _, overload = name.partition("::")[2].partition(".")
        kept = packet.startswith(_PREFIXES_KEPT + _MAKE_QUANTISED) and packet not in _REPLACED
        if packet in _KEPT or kept:
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not _is_view(operator):
            yield operator


#: The list of operators that is installed with PyTorch.
_LIST = Path("packaged", "ATen", "native", "native_functions.yaml")
_FOR_CUDA = re.compile(r"^  (?:structured_delegate:|  [\w, ]*\bCUDA\b)", re.MULTILINE)


_MAKE_QUANTISED = ("quantize_per_", "_make_per_")
#: Operators of quantised tensors that are not replaced: they read metadata, allocate, or copy bytes.
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
    """Return the operators that create quantised tensors or compute with them, each with the dispatch key of its
    implementation."""
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
    """Return whether an operator accepts host tensors without dimensions. PyTorch's CUDA implementations compare the devices
    of all arguments. The exceptions are marked NoCheck in PyTorch's list and check devices themselves: most pointwise
    operators."""
    return operator.name().removeprefix("aten::") not in _comparing_devices()


@functools.cache
def _comparing_devices() -> frozenset[str]:
    """Return the names of the operators whose CUDA implementation compares devices. Empty if this PyTorch lacks the list."""
    generator = importlib.util.find_spec("torchgen")
    folders = generator.submodule_search_locations if generator is not None else None
    try:
        entries = Path((folders or [""])[0], _LIST).read_text().split("\n- func: ")
    except OSError:
        return frozenset()
    comparing = [each for each in entries if "device_check: NoCheck" not in each and _FOR_CUDA.search(each)]
    return frozenset(each[: each.index("(")] for each in comparing)


def has_cpu_implementation(operator: Any) -> bool:
    """Return whether the device process can run the operator: it has an implementation for the CPU or for all devices."""
    found: bool = torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU")
    return found


def functional(operator: Any) -> Any:
    """Return the overload of an out= operator that returns new tensors instead, or None."""
    wanted = [(each.name, str(each.type)) for each in operator._schema.arguments if not each.is_out]
    packet = getattr(torch.ops.aten, operator._schema.name.partition("::")[2])
    for other in [getattr(packet, name) for name in packet.overloads()]:
        arguments = other._schema.arguments
        new = all(each.alias_info is None for each in (*arguments, *other._schema.returns))
        if new and [(each.name, str(each.type)) for each in arguments] == wanted:
            return other
    return None


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)
