"""Checks that operators make and their meta implementations lack. They make a call fail at once instead of on the device."""

from __future__ import annotations

from typing import Any

import torch

from torch_memory_saver._simulate.operators.precision import is_wider_on_cuda, lacks_types

__all__ = [
    "TypeNotImplemented",
    "is_dense",
    "refuse_overlaps",
    "refuses_overlaps",
    "to_one_element",
    "try_types",
]


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


class TypeNotImplemented(NotImplementedError):
    """The operator is not implemented for these types."""


def refuses_overlaps(operator: Any) -> bool:
    """Whether an operator refuses overlapping arguments."""
    return torch.Tag.pointwise in operator.tags or operator._schema.name.partition("::")[2] in _REFUSE_OVERLAPS


def refuse_overlaps(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Checks for overlaps, which meta implementations cannot detect: their tensors have no addresses.

    Raises:
        RuntimeError: Arguments overlap in a way that the operator refuses.
    """
    given = dict(zip([each.name for each in operator._schema.arguments], arguments, strict=False)) | keywords
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for each in operator._schema.arguments:
        if each.alias_info is None or not each.alias_info.is_write or each.name not in tensors:
            continue
        written = tensors[each.name]
        twice = any(step == 0 and length > 1 for step, length in zip(written.stride(), written.shape, strict=True))
        if twice and operator._schema.name.partition("::")[2] not in _WRITE_TWICE:
            raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a" + _SINGLE)
        others = [other for name, other in tensors.items() if name != each.name]
        whole = torch.Tag.pointwise not in operator.tags  # a pointwise operator may write where it reads
        if any(_overlap_partly(written, other, whole) for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a" + _SINGLE
            )


def _overlap_partly(first: torch.Tensor, second: torch.Tensor, whole: bool) -> bool:
    """Whether the tensors overlap, unless they are the same view. With `whole`, equal ranges count as overlapping too."""
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
    """Runs a pointwise operator on the CPU with one element of each argument. Its return value has the types of the full
    result, which meta implementations sometimes get wrong. None for operators that must not or cannot be run this way.

    Raises:
        TypeNotImplemented: The CPU does not support the types of the arguments, nor does CUDA as far as is known.
        Exception: The operator refuses the types of the arguments. Meta implementations accept more types.
    """
    if torch.Tag.nondeterministic_seeded in operator.tags or operator._schema.name.startswith("aten::_foreach_"):
        return None
    outputs = {each.name: torch.empty(0, dtype=keywords[each.name].dtype) for each in _outputs(operator, keywords)}
    try:
        return operator(*to_one_element(arguments), **(to_one_element(keywords) | outputs))
    except RuntimeError as error:
        if not lacks_types(error):
            raise
        if is_wider_on_cuda(operator, [each for each in arguments if isinstance(each, torch.Tensor)]):
            return None
        raise TypeNotImplemented(str(error)) from None


def _outputs(operator: Any, keywords: dict[str, Any]) -> list[Any]:
    return [each for each in operator._schema.arguments if each.is_out and isinstance(keywords.get(each.name), torch.Tensor)]


def to_one_element(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ones([1] * value.dim(), dtype=value.dtype)
    if isinstance(value, (list, tuple)):
        return [to_one_element(each) for each in value]
    if isinstance(value, dict):
        return {name: to_one_element(each) for name, each in value.items()}
    return value


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory without gaps, in any order of dimensions."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
