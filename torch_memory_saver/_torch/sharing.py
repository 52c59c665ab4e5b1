"""Managed tensors cannot be sent to another process: a clear error replaces CUDA's "invalid argument".

CUDA's IPC handles refer to physical memory of cudaMalloc; managed memory is not allocated by cudaMalloc, and changes with
each resume. :func:`install` wraps two functions of PyTorch, at this package's first use of it:
``UntypedStorage._share_cuda_``, which is called whenever a CUDA tensor is shared, and the reducer by which
``multiprocessing`` pickles tensors. A ``multiprocessing.Queue`` pickles on its own thread, which only prints an exception,
so the receiver would wait for ever. There the message is replaced by one that raises the same error in the receiver's
``get()``.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidStateError

__all__ = ["install"]

logger = logging.getLogger("torch_memory_saver")

_OPERATION = "share"
#: The thread of a multiprocessing.Queue that pickles its items.
_FEEDER = "QueueFeederThread"


def install(torch: Any) -> None:
    """Wraps the functions, once. Sharing of other tensors is unchanged."""
    storage: Any = getattr(torch, "UntypedStorage", None)
    share = getattr(storage, "_share_cuda_", None)
    if share is None or hasattr(share, "_torch_memory_saver"):
        return
    from multiprocessing.reduction import ForkingPickler  # slow, but torch has imported it already

    storage._share_cuda_ = _refusing(share)
    reductions = torch.multiprocessing.reductions
    reducers: dict[type, Callable[[Any], Any]] = getattr(ForkingPickler, "_extra_reducers", {})
    for kind, reduce in list(reducers.items()):
        if reduce is reductions.reduce_tensor:
            ForkingPickler.register(kind, _reaching_the_receiver(reduce))


def _refusing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def _share_cuda_(storage: Any, *arguments: Any, **keywords: Any) -> Any:
        row = _core.find(storage.data_ptr())
        if row is None:
            return share(storage, *arguments, **keywords)
        raise InvalidStateError(
            f"{_OPERATION}: this tensor is in managed memory, tag '{row.tag}', which cannot be shared with another process, "
            "because its physical memory goes with each pause. Send tensor.cpu(), or a copy in ordinary memory: "
            "tensor.clone() outside of regions, or inside disable()",
            operation=_OPERATION,
            device=row.device,
            bytes=storage.nbytes(),
            address=storage.data_ptr(),
            tag=row.tag,
        )

    layer: Any = _share_cuda_
    layer._torch_memory_saver = share
    return _share_cuda_


def _reaching_the_receiver(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(reduce)
    def reduce_tensor(tensor: Any) -> Any:
        try:
            return reduce(tensor)
        except InvalidStateError as error:
            if error.operation != _OPERATION or threading.current_thread().name != _FEEDER:
                raise
            logger.error("a message put into a multiprocessing.Queue cannot be sent, and its get() will raise: %s", error)
            return _raise, (error,)

    return reduce_tensor


def _raise(error: BaseException) -> NoReturn:
    """Called when the receiver unpickles the message."""
    raise error
