"""is_paused() and tag_of(): the managed memory that a tensor lies in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.tensor_parts import parts_of
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["is_paused", "tag_of"]


def is_paused(x: Any) -> bool:
    """See :meth:`TorchMemorySaver.is_paused`. Neither imports torch nor loads a driver."""
    return any(row.state != _core.STATE_ACTIVE for row in _rows_of("is_paused", x))


def tag_of(x: Any) -> str | None:
    """See :meth:`TorchMemorySaver.tag_of`, likewise."""
    return next((row.tag for row in _rows_of("tag_of", x)), None)


def _rows_of(function: str, x: Any) -> Iterator[_core.Segment]:
    """The managed allocations that a tensor lies in: one, of a tensor made of others one for each that is managed."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{function}() needs a torch.Tensor, not {type(x).__name__}")
    parts = parts_of(torch, x)
    if parts is not None:
        for part in parts:
            yield from _rows_of(function, part)
    elif x.is_cuda:
        try:
            address = int(x.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidArgumentError(
                f"{function}() needs a tensor with a storage of its own; this one, of layout {x.layout}, has none: ask for "
                f"the tensors that it is made of ({str(error).splitlines()[0]})"
            ) from error
        row = _core.find(address)
        if row is not None:
            yield row
