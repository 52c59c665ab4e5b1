"""What the program and the device process tell each other. A request is pickled; the device's memory is not in it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["PROTOCOL", "Fresh", "Operation", "Place", "Settings", "Shape", "Value", "decode", "encode"]

PROTOCOL = 5


class Place(NamedTuple):
    """Where an argument's tensor is in the list of a request's tensors."""

    number: int


class Value(NamedTuple):
    """A tensor of the host, sent with its contents: a number (``dtype`` None, if it is a number of Python's), or indices."""

    data: Any
    dtype: Any


class Fresh(NamedTuple):
    """A new, empty tensor: for an ``out=`` argument of an operator whose results are kept."""

    dtype: Any


class Shape(NamedTuple):
    """A tensor of the device, or one to be made there.

    Attributes:
        storage: The address of its storage; tensors with the same one overlap for PyTorch as well.
        storage_bytes: How much of the storage there is, from its address.
        offset: In elements.
        dtype: The torch.dtype.
        size, stride: In elements, as torch has them.
        conjugate, negative: The lazy bits of a view.
    """

    storage: int
    storage_bytes: int
    offset: int
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


class Settings(NamedTuple):
    """What of the program's global state the CPU implementations depend on."""

    default_dtype: Any
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class Operation:
    """One request.

    Attributes:
        name: The operator with its overload, such as "aten::add.Tensor".
        arguments, keywords: What it is called with, tensors replaced by Place and Value.
        tensors: Those of the device.
        results: Places of the tensors that its results are copied to, in order; None for a result that is an argument.
            Instead of the tuple None: the results are kept, and described in the answer.
        seed: Place of a tensor whose first element is the seed of the random numbers.
        kept: Instead of an operator: the results kept by an earlier request are copied to `results`, and forgotten.
        settings: See there.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None
    tensors: tuple[Shape, ...] = ()
    results: tuple[int | None, ...] | None = ()
    seed: int | None = None
    kept: int | None = None
    settings: Settings | None = None

    def pack(self) -> bytes:
        fields = (self.name, self.arguments, self.keywords, self.tensors, self.results, self.seed, self.kept, self.settings)
        return encode(fields)


def encode(message: Any) -> bytes:
    return pickle.dumps(message, PROTOCOL)


def decode(data: bytes) -> Any:
    """The message. Only ever from the other end of this process's own socket."""
    return pickle.loads(data)
