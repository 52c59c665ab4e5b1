"""Sends managed tensors to other processes: hooks into PyTorch's functions for that.

CUDA refuses IPC handles for managed memory. :func:`install` wraps, once:

- ``UntypedStorage._share_cuda_``, which describes a storage for another process. Every way of sending a tensor calls it:
  queues, pipes, ``reduce_tensor`` and ``ForkingPickler``. Storages that are not managed are described as before.
- The reducer by which ``multiprocessing`` pickles tensors. A ``multiprocessing.Queue`` pickles on its own thread, which
  only prints an exception, so the receiver would wait for ever. There the message is replaced by one that raises the same
  error in the receiver's ``get()``.
- ``torch.cuda.ipc_collect``, which also releases what shared_memory.py keeps.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch_memory_saver import _core
from torch_memory_saver._torch.shared_memory import Share, SharedMemory
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["install"]

logger = logging.getLogger("torch_memory_saver")

#: The thread of a multiprocessing.Queue that pickles its items.
_FEEDER = "QueueFeederThread"
#: Held while the functions are wrapped. Reentrant, because the main thread's pending call (_preloaded.py) may interrupt it.
_installing = threading.RLock()


def install(torch: Any, shared: SharedMemory) -> None:
    """Wraps the functions, once. Does nothing while another thread is still importing torch: a later use installs them."""
    storage: Any = getattr(torch, "UntypedStorage", None)
    share = getattr(storage, "_share_cuda_", None)
    if share is None or hasattr(share, "_torch_memory_saver") or _is_being_imported(torch):
        return
    from multiprocessing.reduction import ForkingPickler  # slow, but torch has imported it already

    with _installing:
        if hasattr(storage._share_cuda_, "_torch_memory_saver"):  # another thread was first
            return
        torch.cuda.ipc_collect = _collecting_managed(torch.cuda.ipc_collect, shared)
        reductions = torch.multiprocessing.reductions
        reducers: dict[type, Callable[[Any], Any]] = getattr(ForkingPickler, "_extra_reducers", {})
        for kind, reduce in list(reducers.items()):
            if reduce is reductions.reduce_tensor:
                ForkingPickler.register(kind, _reaching_the_receiver(reduce))
        storage._share_cuda_ = _sending_managed(torch, share, shared)


def _is_being_imported(torch: Any) -> bool:
    return bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))


def _sending_managed(torch: Any, share: Share, shared: SharedMemory) -> Share:
    @functools.wraps(share)
    def _share_cuda_(storage: Any, *arguments: Any, **keywords: Any) -> Any:
        row = _core.find(storage.data_ptr())
        if row is None:
            return share(storage, *arguments, **keywords)
        return shared.send(torch, share, storage, row)

    layer: Any = _share_cuda_
    layer._torch_memory_saver = share
    return _share_cuda_


def _collecting_managed(collect: Callable[[], Any], shared: SharedMemory) -> Callable[[], Any]:
    @functools.wraps(collect)
    def ipc_collect() -> Any:
        shared.collect()
        return collect()

    return ipc_collect


def _reaching_the_receiver(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(reduce)
    def reduce_tensor(tensor: Any) -> Any:
        try:
            return reduce(tensor)
        except TorchMemorySaverError as error:
            if threading.current_thread().name != _FEEDER:
                raise
            logger.error("a message put into a multiprocessing.Queue cannot be sent, and its get() will raise: %s", error)
            return _raise, (error,)

    return reduce_tensor


def _raise(error: BaseException) -> NoReturn:
    """Called when the receiver unpickles the message."""
    raise error
