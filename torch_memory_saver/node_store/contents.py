"""The bytes of storages as objects of the shared store: the lists that the core publishes and fills."""

from __future__ import annotations

import threading
from array import array
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._services import layer

from .pieces import Pack, Piece, Plan
from .tensors import Found

__all__ = ["fill", "publish"]


def publish(torch: Any, found: Found, plan: Plan, name: str, contents: str) -> int:
    """Keep the bytes under a file name. Return the number of bytes that the store did not have."""
    packs = [_make_pack(torch, found, pack) for pack in plan.packs]
    for pack, memory in zip(plan.packs, packs, strict=True):
        for part, bytes_of_it in _parts(torch, found, pack, memory):
            part.copy_(bytes_of_it)
    return _core.publish(_pieces(found, plan, packs), name, contents, *_caller())


def fill(torch: Any, found: Found, plan: Plan, objects: list[str]) -> int | None:
    """Fill the storages with objects, or do nothing if one of them does not exist.

    Return the index of the first one that does not, or None.
    """
    if not objects:
        return None
    packs = [_make_pack(torch, found, pack) for pack in plan.packs]
    missing = _core.adopt(_pieces(found, plan, packs), "".join(objects), *_caller())
    if missing is None:
        for pack, memory in zip(plan.packs, packs, strict=True):
            for part, bytes_of_it in _parts(torch, found, pack, memory):
                bytes_of_it.copy_(part)
    return missing


def _caller() -> tuple[int | None, bool]:
    """Return the current stream, and whether a signal may interrupt the call: Python handles signals on the main thread."""
    torch_cuda = layer.in_use()
    stream = None if torch_cuda is None else torch_cuda.current_stream()
    return stream, threading.current_thread() is threading.main_thread()


def _make_pack(torch: Any, found: Found, pack: Pack) -> Any:
    """Return memory for a pack, filled with zeros."""
    return torch.zeros(pack.bytes, dtype=torch.uint8, device=torch.device("cuda", found.devices[pack.device]))


def _bytes_of(torch: Any, storage: Any, piece: Piece) -> Any:
    """Return a tensor of some bytes of a storage. It is no view, so that autograd does not notice."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, piece.offset, (piece.bytes,), (1,))


def _parts(torch: Any, found: Found, pack: Pack, memory: Any) -> Any:
    """Yield for each piece of a pack its bytes in the pack, and in its storage."""
    at = 0
    for piece in pack.pieces:
        yield memory[at : at + piece.bytes], _bytes_of(torch, found.storages[piece.storage], piece)
        at += piece.bytes


def _pieces(found: Found, plan: Plan, packs: list[Any]) -> bytes:
    """Return the addresses, sizes and devices of all objects, as the core reads them."""
    numbers = array("Q")
    for piece in plan.pieces:
        storage = found.storages[piece.storage]
        numbers.extend((storage.data_ptr() + piece.offset, piece.bytes, storage.device.index))
    for pack, memory in zip(plan.packs, packs, strict=True):
        numbers.extend((memory.data_ptr(), pack.bytes, found.devices[pack.device]))
    return numbers.tobytes()
