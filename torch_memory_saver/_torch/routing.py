"""Routing of a thread's allocations to memory pools, and the end of pools.

The end of a ``MemPool`` object that has another use does nothing since PyTorch 2.10, and ends the process before. Up to 2.9
the objects are therefore never destroyed: a retired pool leaks some hundred bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch_memory_saver._torch.steps import call_each, record_each

if TYPE_CHECKING:
    from torch_memory_saver._torch.layer import TorchCuda

__all__ = ["PoolId", "Routing", "drop_reference", "has_idle_segment", "leak_reference", "retire"]

#: Calls a partial object, without bytecode.
_CALL = functools.partial.__call__
#: torch's identifier of a pool.
PoolId = tuple[int, int]


class _Pool(Protocol):
    """The part of pools.Pool that is used here."""

    memory_pool: Any
    id: PoolId
    retirement: Iterator[tuple[Callable[[], object]]] | None

    @property
    def device(self) -> int: ...


class Routing:
    """The routing of one thread's allocations to some pools, one of each device. Begun once and ended once; both can be
    interrupted by a signal handler that raises, and repeated."""

    __slots__ = ("_begun", "_ends", "_pools", "_releases", "_torch")

    def __init__(self, torch: TorchCuda, pools: list[tuple[int, PoolId]]) -> None:
        self._torch = torch
        self._pools = pools
        self._begun: list[None] = []
        self._ends: Iterator[tuple[int, PoolId]] | None = None
        self._releases: Iterator[tuple[int, PoolId]] | None = None

    @property
    def is_ending(self) -> bool:
        return self._ends is not None

    def begin(self) -> None:
        """Route the thread's allocations. If PyTorch refuses one of the pools, those before it stay routed."""
        record_each(self._begun, self._torch.begin_routing, self._pools[len(self._begun) :])

    def end(self) -> None:
        """End what has begun, from any thread. If PyTorch refuses it for one pool, a repetition continues with the next."""
        if self._ends is None:
            self._ends = iter(self._pools[: len(self._begun)])
        call_each(self._torch.end_routing, self._ends)
        if self._releases is None:
            self._releases = iter(self._pools[: len(self._begun)])
        call_each(self._torch.release_pool, self._releases)


def retire(torch: TorchCuda, pool: _Pool) -> None:
    """Retire a pool that is not routed: torch releases its segments at the next emptying after their last tensor is gone.

    Routing it once leaves it with one use besides the object's own, so the object can be destroyed even while other pools
    are routed; releasing that use then retires the pool. If destroying the object would end the process, the object's own
    use is released instead, and the object stays. A signal handler cannot divide this (steps.py), and it may be repeated.
    """
    if pool.retirement is None:
        pool.retirement = iter([(step,) for step in _steps_of_retirement(torch, pool)])
    call_each(_CALL, pool.retirement)


def _steps_of_retirement(torch: TorchCuda, pool: _Pool) -> list[Callable[[], object]]:
    forget = functools.partial(setattr, pool, "memory_pool", None)  # no other reference must keep the object
    release = functools.partial(torch.release_pool, pool.device, pool.id)
    if not torch.pool_objects_end_quietly:
        return [forget, release]
    return [
        functools.partial(torch.begin_routing, pool.device, pool.id),
        functools.partial(torch.end_routing, pool.device, pool.id),
        functools.partial(ctypes.pythonapi.Py_DecRef, ctypes.c_void_p(id(pool.memory_pool))),  # the leaked reference
        forget,
        release,
    ]


def has_idle_segment(segments: list[dict[str, Any]]) -> bool:
    """Return whether retiring a pool with these segments releases memory to the driver."""
    return any(all(block["state"] == "inactive" for block in segment["blocks"]) for segment in segments)


def leak_reference(thing: object) -> None:
    """Keeps an object alive through the interpreter's exit. Destroying a MemPool while any pool is routed, for instance at
    the exit of a program that ends inside a region, would abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def drop_reference(thing: object) -> None:
    """Undoes :func:`leak_reference`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
