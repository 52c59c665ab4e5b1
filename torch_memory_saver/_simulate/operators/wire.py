"""The format of requests to the device process and of its answers: pickled tuples without the contents of device memory."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["PROTOCOL", "Fresh", "Operation", "Place", "Settings", "Shape", "Value", "decode", "encode"]

PROTOCOL = 5


class Place(NamedTuple):
    """Replaces a tensor: its index in the request's list of tensors."""

    number: int


class Value(NamedTuple):
    """Replaces a host tensor and has its contents: a number or indices. If ``dtype`` is None, it is a Python number."""

    data: Any
    dtype: Any


class Fresh(NamedTuple):
    """Replaces an ``out=`` argument of an operator whose results are kept: the device process creates an empty tensor."""

    dtype: Any


class Shape(NamedTuple):
    """Describes a tensor on the device, or a result.

    Attributes:
        storage: The address of its storage in the program. Tensors with equal addresses share a storage.
        storage_bytes: The size of the storage in bytes.
        offset: The offset in the storage, in elements.
        dtype: The torch.dtype.
        size, stride: As in torch, in elements.
        conjugate, negative: PyTorch's lazy conjugate and negative bits.
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
    """The program's global settings that CPU implementations read."""

    default_dtype: Any
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class Operation:
    """One request.

    Attributes:
        name: The operator with its overload, such as "aten::add.Tensor".
        arguments, keywords: The operator's arguments, with tensors replaced by Place, Value and Fresh.
        tensors: The device tensors that the request uses.
        results: For each result, the index of the tensor that receives it, or None for a result that is an argument. None
            instead of a tuple: the device process keeps the results and describes them in its answer.
        random: Whether the operator is seeded with the number that comes with the request.
        kept: The key of results kept by an earlier request, or None. With a key, no operator runs: the kept results are
            copied to `results` and dropped.
        settings: The program's settings; None leaves them unchanged.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None
    tensors: tuple[Shape, ...] = ()
    results: tuple[int | None, ...] | None = ()
    random: bool = False
    kept: int | None = None
    settings: Settings | None = None

    def pack(self) -> bytes:
        fields = (
            self.name,
            self.arguments,
            self.keywords,
            self.tensors,
            self.results,
            self.random,
            self.kept,
            self.settings,
        )
        return encode(fields)


def encode(message: Any) -> bytes:
    return pickle.dumps(message, PROTOCOL)


def decode(data: bytes) -> Any:
    """Decode a message. Unpickling is safe only because the other end of the socket belongs to the same program."""
    return pickle.loads(data)
