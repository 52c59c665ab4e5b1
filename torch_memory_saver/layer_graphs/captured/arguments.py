"""The inputs of a captured layer or step: their checks, and the static tensors into which they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Arguments", "TensorKind", "check_plain", "is_same_tensor"]

#: Marks the place of each tensor among the constants.
_TENSOR = object()


class TensorKind(NamedTuple):
    """The properties that two tensors must share so that one can take the other's place in a graph."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorKind:
        """Return the kind of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> Any:
        """Return an uninitialised, contiguous tensor of this kind."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a sample, from which the tensors were taken out.

    Attributes:
        owner: The layer or step, for messages.
        kinds: The kinds of the tensors, in the order of the arguments. Tensors may lie in tuples, lists and dicts.
    """

    owner: str
    kinds: tuple[TensorKind, ...]
    _constants: tuple[Any, ...]  # _TENSOR in the place of a tensor
    _structure: Any

    @classmethod
    def of(cls, owner: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Arguments:
        """Take the tensors out of the arguments of a sample.

        Raises:
            InvalidArgumentError: A tensor is not on a GPU, is not dense, or is made of other tensors.
        """
        leaves, structure = _pytree.tree_flatten((tuple(arguments), dict(keywords)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for number, tensor in enumerate(tensors):
            check_plain(owner, f"tensor {number} of the sample", tensor)
            if not tensor.is_cuda or tensor.layout != torch.strided:
                raise InvalidArgumentError(
                    f"{owner}: tensor {number} of the sample is {tensor.layout} on {tensor.device}; a graph reads dense "
                    "tensors on a GPU. Pass other values as Python numbers: they are constants of the graph"
                )
        constants = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(owner, tuple(TensorKind.of(tensor) for tensor in tensors), constants, structure)

    def tensors_of(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the tensors of a call.

        Raises:
            InvalidArgumentError: The call does not fit the sample.
        """
        leaves, structure = _pytree.tree_flatten((tuple(arguments), dict(keywords)))
        if structure != self._structure:
            raise InvalidArgumentError(
                f"{self.owner}: the arguments are {_describe_call(leaves, structure)}, and were "
                f"{_describe_call(self._constants, self._structure)} when it was captured. Pass arguments of the same "
                "structure, or capture again with another sample"
            )
        tensors: list[Any] = []
        for leaf, constant in zip(leaves, self._constants, strict=True):
            fits = isinstance(leaf, torch.Tensor) if constant is _TENSOR else _equal(leaf, constant)
            if not fits:
                raise InvalidArgumentError(
                    f"{self.owner}: {_describe(leaf)} was passed where {_describe(constant)} was captured. A graph reads "
                    "tensors only, and every other value is a constant in it. Pass what was captured, or capture again "
                    "with the new value"
                )
            if constant is _TENSOR:
                self._check(len(tensors), leaf)
                tensors.append(leaf)
        return tuple(tensors)

    def _check(self, number: int, tensor: Any) -> None:
        check_plain(self.owner, f"tensor {number}", tensor)
        given, kind = TensorKind.of(tensor), self.kinds[number]
        if given[:3] != kind[:3]:
            raise InvalidArgumentError(
                f"{self.owner}: tensor {number} is {given.dtype} {list(given.shape)} on {given.device}, and was "
                f"{kind.dtype} {list(kind.shape)} on {kind.device} when it was captured. A graph has fixed shapes: pad "
                "the tensor, or capture again with a sample of this shape"
            )
        if given.requires_grad and not kind.requires_grad:
            raise InvalidArgumentError(
                f"{self.owner}: tensor {number} requires a gradient, and its sample did not, so the captured backward does "
                "not compute this gradient. Capture again with a sample that requires a gradient (requires_grad_()), or "
                "detach the tensor"
            )

    def fill(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is _TENSOR else constant for constant in self._constants]
        arguments, keywords = _pytree.tree_unflatten(leaves, self._structure)
        return arguments, keywords


def check_plain(owner: str, what: str, tensor: Any) -> None:
    """Check that a tensor has memory of its own, which a graph can read and write.

    Raises:
        InvalidArgumentError: The tensor is made of other tensors, as a DTensor is.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        raise InvalidArgumentError(
            f"{owner}: {what} is a {type(tensor).__name__}, which is made of other tensors; a graph reads and writes "
            "tensors with memory of their own. Use the tensors that it is made of, such as to_local() of a DTensor"
        )


def _equal(value: Any, constant: Any) -> bool:
    return value is constant or (type(value) is type(constant) and bool(value == constant))


class _Placeholder:
    """A leaf that prints as a given text in a message."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _describe_call(leaves: Sequence[Any], structure: Any) -> str:
    arguments, keywords = _pytree.tree_unflatten([_Placeholder(_describe(leaf)) for leaf in leaves], structure)
    return "(" + ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in keywords.items())]) + ")"


def _describe(value: Any) -> str:
    return "a tensor" if value is _TENSOR or isinstance(value, torch.Tensor) else repr(value)


def is_same_tensor(tensor: Any, static: Any) -> bool:
    """Return whether a tensor already lies where it would be copied."""
    return bool(tensor.data_ptr() == static.data_ptr() and tensor.stride() == static.stride())
