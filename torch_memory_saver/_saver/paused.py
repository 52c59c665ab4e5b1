"""is_paused(): whether a tensor's memory may be accessed."""

from __future__ import annotations

import sys
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.tensor_parts import parts_of
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["is_paused"]


def is_paused(x: Any) -> bool:
    """See :meth:`TorchMemorySaver.is_paused`. Neither imports torch nor loads a driver."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"is_paused() needs a torch.Tensor, not {type(x).__name__}")
    parts = parts_of(torch, x)
    if parts is not None:
        return any(is_paused(part) for part in parts)
    if not x.is_cuda:
        return False
    try:
        address = int(x.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"is_paused() needs a tensor with a storage of its own; this one, of layout {x.layout}, has none: ask for the "
            f"tensors that it is made of ({str(error).splitlines()[0]})"
        ) from error
    row = _core.find(address)
    return row is not None and bool(row.state != _core.STATE_ACTIVE)
