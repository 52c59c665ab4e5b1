"""get_cpu_backup(): host copies as CPU tensors."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._engine.pending import on_main_thread
from torch_memory_saver._torch import layer
from torch_memory_saver.errors import InvalidArgumentError, NotManagedError, TorchUnavailableError

__all__ = ["get_cpu_backup"]


def get_cpu_backup(x: Any, zero_copy: bool) -> Any:
    """See :meth:`TorchMemorySaver.get_cpu_backup`."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise TorchUnavailableError("get_cpu_backup() needs PyTorch, which could not be imported") from error
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"get_cpu_backup() needs a torch.Tensor, not {type(x).__name__}")
    if x.layout != torch.strided or not x.is_contiguous():
        raise InvalidArgumentError(
            f"get_cpu_backup() needs a contiguous tensor; this one has shape {tuple(x.shape)}"
            + (f" and strides {tuple(x.stride())}" if x.layout == torch.strided else f" and layout {x.layout}")
        )
    if x.is_conj() or x.is_neg():
        raise InvalidArgumentError("get_cpu_backup() needs a tensor whose memory holds its values: this is a lazy conjugate")
    if not x.is_cuda:
        raise NotManagedError(f"this tensor is on device {x.device}, not on a CUDA device", operation="get_cpu_backup")
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    size = x.numel() * x.element_size()
    owner = _core.host_backup(x.data_ptr(), size)
    if owner is None:
        return _read(torch, x, size)
    view = _as_bytes(owner, size)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    return (tensor if zero_copy else tensor.clone()).view(x.dtype).view(x.shape)


def _read(torch: Any, x: Any, size: int) -> Any:
    """The contents of a paused tensor from a backup on disk, or None if there is none."""
    row = _core.find(x.data_ptr())
    if row is None or row.state == _core.STATE_ACTIVE or row.backup_bytes == 0:
        return None
    copy = torch.empty(x.shape, dtype=x.dtype)
    torch_cuda = layer.in_use()
    stream = None if torch_cuda is None else torch_cuda.current_stream()
    is_read = _core.read_backup(x.data_ptr(), size, copy.data_ptr(), stream, interruptible=on_main_thread())
    return copy if is_read else None


def _as_bytes(owner: _core.HostBuffer, size: int) -> Any:
    """A buffer over the host copy that keeps it alive. torch keeps the buffer while a tensor uses it."""
    view: Any = (ctypes.c_ubyte * size).from_address(owner.address)
    # This attribute holds the reference that keeps the memory.
    view.owner = owner
    return view
