"""What an operator refuses, and its meta implementation does not: so that it is refused at the call, not on the device."""

from __future__ import annotations

from typing import Any

import torch

from torch_memory_saver._simulate.operators.precision import is_wider_on_cuda, lacks_types

__all__ = [
    "TypeNotImplemented",
    "is_dense",
    "refuse_overlaps",
    "refuse_types",
    "refuses_overlaps",
    "rehearse",
    "to_one_element",
    "try_types",
]


_SINGLE = " single memory location. Please clone() the tensor before performing the operation."


#: Not pointwise, and they refuse overlaps.
_REFUSE_OVERLAPS = frozenset(("bernoulli", "cat", "gather", "index_select", "kthvalue", "masked_select", "take"))

#: What these refuse depends on types, shapes and numbers, and PyTorch has no meta implementation that refuses it.
_REHEARSED = frozenset(
    (
        "aminmax",
        "bernoulli_",
        "bucketize",
        "complex",
        "convolution",
        "kthvalue",
        "linalg_solve_triangular",
        "masked_fill_",
        "masked_scatter_",
        "multinomial",
        "normal",
        "normal_",
        "searchsorted",
        "uniform_",
    )
)
_REHEARSED_ELEMENTS = 1 << 16

#: Among these, beside one that has a fraction, there is none that the CPU lacks.
_COMMON = frozenset((torch.float32, torch.float64, torch.int32, torch.int64, torch.bool))
#: Operator and types -> why they are refused, or None.
_types_tried: dict[tuple[Any, tuple[torch.dtype, ...]], str | None] = {}


class TypeNotImplemented(NotImplementedError):
    """The operator is not implemented for these types."""


def refuses_overlaps(operator: Any) -> bool:
    """Whether an operator refuses to write where it reads."""
    return torch.Tag.pointwise in operator.tags or operator._schema.name.partition("::")[2] in _REFUSE_OVERLAPS


def refuse_overlaps(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises what the operator raises for them. The meta implementations do not: their tensors have no addresses."""
    given = dict(zip([each.name for each in operator._schema.arguments], arguments, strict=False)) | keywords
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for each in operator._schema.arguments:
        if each.alias_info is None or not each.alias_info.is_write or each.name not in tensors:
            continue
        written = tensors[each.name]
        if any(step == 0 and length > 1 for step, length in zip(written.stride(), written.shape, strict=True)):
            raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a" + _SINGLE)
        others = [other for name, other in tensors.items() if name != each.name]
        whole = torch.Tag.pointwise not in operator.tags  # a pointwise operator may write where it reads
        if any(_overlap_partly(written, other, whole) for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a" + _SINGLE
            )


def rehearse(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Has the CPU do the operator with ones, if that is little work: it raises what the operator refuses."""
    name = operator._schema.name.partition("::")[2]
    tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)]
    if name not in _REHEARSED or sum(each.numel() for each in tensors) > _REHEARSED_ELEMENTS:
        return
    named = {each: _ones(value) for each, value in keywords.items()}
    if any(each.name == "generator" for each in operator._schema.arguments):
        named["generator"] = torch.Generator()  # the program's stays as it is
    operator(*[_ones(each) for each in arguments], **named)


def _ones(value: Any) -> Any:
    """A mask is empty instead: how much is under it is no matter of types and shapes."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.full(value.shape, value.dtype != torch.bool, dtype=value.dtype)


def _overlap_partly(first: torch.Tensor, second: torch.Tensor, whole: bool) -> bool:
    """Or are the same, with `whole`."""
    if not first.numel() or not second.numel():
        return False
    if not (is_dense(first) and is_dense(second)):
        return False  # too hard to know, for PyTorch as well
    at, other = first.data_ptr(), second.data_ptr()
    end, other_end = at + first.nbytes, other + second.nbytes
    if (at, end) == (other, other_end):
        return whole or bool(first.stride() != second.stride())
    return bool(at < other_end and other < end)


def try_types(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a pointwise operator returns for one element of each argument, None if it should not be run. Its types are those
    of the whole result; those of the meta implementations are not always.

    Raises:
        Exception: What the operator raises for types of arguments. The meta implementations take more of them.
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


def refuse_types(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Has the CPU do an operator that is not pointwise, once for the types of its arguments, if it may lack them and that is
    little work.

    Raises:
        TypeNotImplemented: It lacks them.
    """
    tensors = _tensors([*arguments, *keywords.values()])
    types = tuple([each.dtype for each in tensors])
    outputs = {each.name for each in operator._schema.arguments if each.is_out}
    sizes = [each.numel() for each in _tensors([*arguments, *[keywords[name] for name in keywords.keys() - outputs]])]
    if _COMMON.issuperset(types) and any(each.is_floating_point for each in types):
        return
    if not tensors or 0 in sizes or sum(sizes) > _REHEARSED_ELEMENTS:
        return
    if (operator, types) not in _types_tried:
        _types_tried[operator, types] = _try(operator, tensors, arguments, keywords)
    refusal = _types_tried[operator, types]
    if refusal is not None:
        raise TypeNotImplemented(refusal)


def _try(operator: Any, tensors: list[torch.Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """Why the types are refused."""
    if is_wider_on_cuda(operator, tensors):
        return None
    named = _blank(keywords)
    if any(each.name == "generator" for each in operator._schema.arguments):
        named["generator"] = torch.Generator()
    elif torch.Tag.nondeterministic_seeded in operator.tags:
        return None  # it would change the state of the program's
    try:
        operator(*_blank(arguments), **named)
    except Exception as error:  # maybe because of the values, or refused elsewhere
        if not lacks_types(error):
            return None
        types = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
        return f"{error}: {operator.name()} of {types} has no CPU implementation, and the simulated GPU runs those"
    return None


def _blank(value: Any) -> Any:
    """Numbers that are good for the device's tensors: zeros where they may be indices."""
    if isinstance(value, torch.Tensor):
        made = torch.ones if value.is_floating_point() or value.is_complex() else torch.zeros
        return made(value.shape, dtype=value.dtype)
    if isinstance(value, (list, tuple)):
        return [_blank(each) for each in value]
    if isinstance(value, dict):
        return {name: _blank(each) for name, each in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


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
    """Whether its elements are all that lies between the first and the last, in any order."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
