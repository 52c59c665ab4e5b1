"""Checks that operators make and their meta implementations lack. They make a call fail at once instead of on the device, or
during a capture if CUDA's implementation waits for the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver._simulate.operators.devices import is_filled_by_mask, masks_in
from torch_memory_saver._simulate.operators.precision import is_wider_on_cuda, lacks_types

__all__ = [
    "is_dense",
    "is_expanded",
    "is_of_stand_ins",
    "refuse_overlaps",
    "refuses_overlaps",
    "tensors_in",
    "to_one_element",
    "try_types",
    "unsupported",
    "wait_of",
]

#: The message for a type that a kernel lacks.
_OF_A_KERNEL = re.compile(r"\" not implemented for '")
_RESIZES = "doesn't match the broadcast shape"
#: The message for a divisor that is zero, as stand-ins are.
_OF_STAND_INS = "ZeroDivisionError"

_SINGLE = " single memory location. Please clone() the tensor before performing the operation."


#: Operators that refuse overlaps although they are not pointwise.
_REFUSE_OVERLAPS = frozenset(
    (
        "_index_put_impl_",
        "bernoulli",
        "cat",
        "gather",
        "index_add_",
        "index_copy_",
        "index_select",
        "kthvalue",
        "masked_scatter_",
        "masked_select",
        "put_",
        "scatter_",
        "scatter_add_",
        "take",
    )
)
#: Operators that only warn if several elements of a written tensor share a location.
_WRITE_TWICE = frozenset(("_index_put_impl_",))
#: Operators that may write where they read although they are not pointwise.
_WRITE_IN_PLACE = frozenset(("copy_",))


def unsupported(error: Exception, operator: Any, arguments: Any) -> Exception:
    """Return the error to raise for one by which the CPU's implementation of an operator refused the types of its arguments.

    CUDA has the same checks and messages, except for those of kernels: then it may be that only the CPU's lacks a type.
    """
    if not _OF_A_KERNEL.search(str(error)):
        return error
    types = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors_in(arguments)}))
    return NotImplementedError(
        f"{error}: {operator.name()} of {types} has no CPU implementation, and the simulated GPU runs those"
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument. The argument may be a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def refuses_overlaps(operator: Any) -> bool:
    """Return whether an operator refuses overlapping arguments."""
    return torch.Tag.pointwise in operator.tags or operator._schema.name.partition("::")[2] in _REFUSE_OVERLAPS


def refuse_overlaps(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Check for overlaps. Meta implementations cannot detect overlaps, because their tensors have no addresses.

    Raises:
        RuntimeError: Arguments overlap in a way that the operator refuses.
    """
    given = dict(zip([each.name for each in operator._schema.arguments], arguments, strict=False)) | keywords
    kind = operator._schema.name.partition("::")[2]
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for each in operator._schema.arguments:
        if each.alias_info is None or not each.alias_info.is_write or each.name not in tensors:
            continue
        written = tensors[each.name]
        if is_expanded(written) and kind not in _WRITE_TWICE:
            raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a" + _SINGLE)
        others = [other for name, other in tensors.items() if name != each.name]
        # A pointwise operator may write where it reads.
        whole = torch.Tag.pointwise not in operator.tags and kind not in _WRITE_IN_PLACE
        if any(_overlap_partly(written, other, whole) for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a" + _SINGLE
            )


def _overlap_partly(first: torch.Tensor, second: torch.Tensor, whole: bool) -> bool:
    """Return whether the tensors overlap, unless they are the same view. With `whole`, equal ranges count as overlapping
    too."""
    if not first.numel() or not second.numel():
        return False
    if not (is_dense(first) and is_dense(second)):
        return False  # undecided, as in PyTorch
    at, other = first.data_ptr(), second.data_ptr()
    end, other_end = at + first.nbytes, other + second.nbytes
    if (at, end) == (other, other_end):
        return whole or bool(first.stride() != second.stride())
    return bool(at < other_end and other < end)


def try_types(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run a pointwise operator on the CPU with one element of each argument. Its return value has the types of the full
    result, which meta implementations sometimes get wrong. None for operators that must not or cannot be run this way.

    Raises:
        Exception: The operator refuses the types of the arguments. Meta implementations accept more types.
    """
    if torch.Tag.nondeterministic_seeded in operator.tags or operator._schema.name.startswith("aten::_foreach_"):
        return None
    outputs = {each.name: torch.empty(0, dtype=keywords[each.name].dtype) for each in _outputs(operator, keywords)}
    try:
        return operator(*to_one_element(arguments), **(to_one_element(keywords) | outputs))
    except RuntimeError as error:
        if _RESIZES in str(error):
            return _refuse_to_resize(tensors_in([*arguments, *keywords.values()]))
        if is_of_stand_ins(error):
            return None
        if not lacks_types(error):
            raise
        if is_wider_on_cuda(operator, tensors_in(arguments)):
            return None
        raise unsupported(error, operator, [arguments, list(keywords.values())]) from None


def _refuse_to_resize(tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError if the result is larger than the first argument of an in-place operator. Shapes that do not fit
    together are left to the meta implementation."""
    try:
        result = torch.broadcast_shapes(*[each.shape for each in tensors])
    except RuntimeError:
        return
    if result != tensors[0].shape:
        raise RuntimeError(f"output with shape {list(tensors[0].shape)} {_RESIZES} {list(result)}")


def _outputs(operator: Any, keywords: dict[str, Any]) -> list[Any]:
    return [each for each in operator._schema.arguments if each.is_out and isinstance(keywords.get(each.name), torch.Tensor)]


def is_of_stand_ins(error: Exception) -> bool:
    """Return whether an error is about values that stand-ins for tensors do not share with them."""
    return _OF_STAND_INS in str(error)


def to_one_element(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ones([1] * value.dim(), dtype=value.dtype)
    if isinstance(value, (list, tuple)):
        return [to_one_element(each) for each in value]
    if isinstance(value, dict):
        return {name: to_one_element(each) for name, each in value.items()}
    return value


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share a location because a dimension has no stride."""
    return any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory without gaps, in any order of dimensions."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def wait_of(operator: Any) -> Callable[[dict[str, Any]], None] | None:
    """Return the function that waits for the device if CUDA's implementation does. It takes the arguments by name. During a
    capture it raises PyTorch's exception. None if CUDA's implementation never waits, or the one here waits itself."""
    return _WAITS.get(operator._schema.name.removeprefix("aten::"))


def _of_an_assignment(given: dict[str, Any]) -> None:
    """Count the places that a mask selects."""
    if masks_in(given["indices"]) and not is_filled_by_mask(given):
        _synchronise(given)


def _of_a_histogram(given: dict[str, Any]) -> None:
    """Find the limits if none are given."""
    if given.get("min", 0) == given.get("max", 0):
        _copy_to_the_host(given)


def _copy_to_the_host(given: dict[str, Any]) -> None:
    if given["self"].numel():
        given["self"].cpu()


def _synchronise(given: dict[str, Any]) -> None:
    tensor = given["self"] if "self" in given else given["A"]
    torch.cuda.current_stream(tensor.device).synchronize()


_WAITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_index_put_impl_": _of_an_assignment,
    "_linalg_eigh": _synchronise,
    "bincount": _copy_to_the_host,
    "histc": _of_a_histogram,
}
