"""The end of a pool: the steps after which PyTorch releases its segments as they empty.

Destroying a pool's object while a pool is routed on any thread ends the process, so the reference to each object is leaked
until :func:`retire` drops it. The end of an object that has another use does nothing since PyTorch 2.10, and ends the
process before. Up to 2.9 the objects are therefore never destroyed: a retired pool leaks some hundred bytes. Since 2.13 only
a capture makes the end of an object end the process, and the end of an object without another use releases what is idle in
its pool.

Any thread may call; only one thread may retire a given pool at a time. PyTorch is called, so the caller holds no lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import call_each
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, devices_in_use

__all__ = ["before_emptying", "must_not_free", "needs_emptying", "retire", "retire_at_emptying"]

#: Called at the beginning of ``empty_cache()`` with the mask of the devices in use. No lock is held then.
before_emptying: list[Callable[[int], None]] = []


#: Makes the steps that retire a pool.
_Steps = Callable[[TorchCuda, "_Retirable"], list[functools.partial[Any]]]


class _Retirable(Protocol):
    """A pool that :func:`retire` accepts: a :class:`Pool`, or one of a watched device (late_devices.py)."""

    memory_pool: Any
    id: PoolId
    retirement: Iterator[functools.partial[Any]] | None

    @property
    def device(self) -> int: ...


def must_not_free(torch: TorchCuda) -> bool:
    """Return whether a capture is active, or the device is lost. The native pause, which comes next and checks the same,
    raises the error."""
    try:
        return torch.is_capturing() or bool(_core.counters()["visible_captures"])
    except RuntimeError:
        return True


def needs_emptying(torch: TorchCuda) -> bool:
    """Return whether the memory of a pool that is retired now waits for an emptying."""
    return torch.routing_spares_cache or _core.in_transition() or must_not_free(torch)


def retire(torch: TorchCuda, pool: _Retirable) -> None:
    """Retire a pool as :func:`retire_at_emptying` does.

    Since PyTorch 2.13 the segments that have no tensor are released at once, unless a capture is active, or this thread is
    inside a pause or resume, where the capture gate must not be taken.
    """
    if needs_emptying(torch):
        retire_at_emptying(torch, pool)
    else:
        _core.within(capture_gate.held(), _retire, torch, pool, _steps_with_release)


def retire_at_emptying(torch: TorchCuda, pool: _Retirable) -> None:
    """Retire a pool that is not routed: torch releases its segments at the next emptying after their last tensor is gone.
    A signal handler cannot divide a retirement (steps.py), and it may be repeated, but not by two threads at once. Takes no
    lock."""
    _retire(torch, pool, _steps_of_retirement)


def _retire(torch: TorchCuda, pool: _Retirable, steps: _Steps) -> None:
    if pool.retirement is None:
        pool.retirement = iter(steps(torch, pool))
    call_each(pool.retirement)


def _steps_of_retirement(torch: TorchCuda, pool: _Retirable) -> list[functools.partial[Any]]:
    """Routing the pool once leaves it with one use besides the object's own, so the object can be destroyed even while other
    pools are routed; releasing that use then retires the pool. If destroying the object would end the process, the object's
    own use is released instead, and the object stays."""
    release = functools.partial(torch.release_pool, pool.device, pool.id)
    if not torch.pool_objects_end_quietly:
        return [functools.partial(setattr, pool, "memory_pool", None), release]
    return [
        functools.partial(torch.begin_routing, pool.device, pool.id),
        functools.partial(torch.end_routing, pool.device, pool.id),
        *_steps_of_destruction(pool),
        release,
    ]


def _steps_with_release(torch: TorchCuda, pool: _Retirable) -> list[functools.partial[Any]]:
    """Return the steps that retire a pool and free its memory.

    The caller holds the capture gate. The end of the object holds the GIL, and a free waits for the devices: they are waited
    for before.
    """
    if must_not_free(torch):
        return _steps_of_retirement(torch, pool)
    return [*(functools.partial(torch.synchronize, device) for device in devices_in_use()), *_steps_of_destruction(pool)]


def _steps_of_destruction(pool: _Retirable) -> list[functools.partial[Any]]:
    return [
        functools.partial(ctypes.pythonapi.Py_DecRef, ctypes.c_void_p(id(pool.memory_pool))),  # the leaked reference
        functools.partial(setattr, pool, "memory_pool", None),  # the last one
    ]
