"""Routing of allocations to memory pools, and its end, in the different releases of PyTorch.

===========  ===========================  ========================  ==========================================
PyTorch      a routing applies to         a pool's frees are by     the end of a MemPool that has another use
===========  ===========================  ========================  ==========================================
2.10 and on  its thread                   the pool's allocator      does nothing
2.8, 2.9     its thread                   the pool's allocator      ends the process
2.6, 2.7     every thread of the process  the thread's active pool  ends the process
===========  ===========================  ========================  ==========================================

Up to 2.9 the objects are therefore never destroyed: a retired pool leaks some hundred bytes. :class:`ProcessRouting` lists
the limits of 2.6 and 2.7.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch_memory_saver import _core
from torch_memory_saver._torch.steps import call_each, record_each
from torch_memory_saver.errors import TorchUnavailableError

if TYPE_CHECKING:
    from torch_memory_saver._torch.layer import TorchCuda

__all__ = ["PoolId", "ProcessRouting", "Routing", "ThreadRouting", "drop_reference", "leak_reference", "make_routing"]

logger = logging.getLogger("torch_memory_saver")

#: Calls a partial object, without bytecode.
_CALL = functools.partial.__call__
#: torch's identifier of a pool.
PoolId = tuple[int, int]
Segments = list[dict[str, Any]]

_OLDEST_VERSION = "2.6"
#: Since this version a MemPool can be destroyed while it has other uses.
_OBJECTS_END_QUIETLY = (2, 10)
#: The error of 2.6 and 2.7 when their cache is emptied while anything is routed or captured on any thread.
_BUSY = "captures_underway.empty()"


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


class ThreadRouting:
    """PyTorch 2.8 and later.

    Attributes:
        every_thread: Whether a routing applies to every thread, and to one device at a time.
        begin: (device, pool id): routes this thread's allocations on the device to the pool.
        end: (device, pool id): ends that. The pool keeps one more use than before, which `release` removes.
        end_capture: (device, pool id): ends the routing that torch began for a capture, if the capture's end failed.
        release: (device, pool id).
        empty_cache: Releases the memory of segments without a tensor.
    """

    every_thread = False

    def __init__(self, extension: Any, objects_end_quietly: bool) -> None:
        self.begin: Callable[[int, PoolId], None] = extension._cuda_beginAllocateCurrentThreadToPool
        self.end: Callable[[int, PoolId], None] = extension._cuda_endAllocateToPool
        self.end_capture = self.end
        self.release: Callable[[int, PoolId], None] = extension._cuda_releasePool
        self.empty_cache: Callable[[], None] = extension._cuda_emptyCache
        self._objects_end_quietly = objects_end_quietly

    def made(self, memory_pool: Any, managed: bool) -> None:
        """Called for each new MemPool, whose reference is leaked."""

    def give_up(self, pool: _Pool) -> None:
        """Retires a pool that is not routed: torch releases its segments at the next emptying after their last tensor is
        gone.

        Routing it once leaves it with one use besides the object's own, so the object can be destroyed even while other
        pools are routed; releasing that use then retires the pool. If destroying the object would end the process, the
        object's own use is released instead, and the object stays. A signal handler cannot divide this (steps.py), and it
        may be repeated.
        """
        if pool.retirement is None:
            pool.retirement = iter([(step,) for step in self._steps_of_retirement(pool)])
        call_each(_CALL, pool.retirement)

    def _steps_of_retirement(self, pool: _Pool) -> list[Callable[[], object]]:
        forget = functools.partial(setattr, pool, "memory_pool", None)  # no other reference must keep the object
        release = functools.partial(self.release, pool.device, pool.id)
        if not self._objects_end_quietly:
            return [forget, release]
        return [
            functools.partial(self.begin, pool.device, pool.id),
            functools.partial(self.end, pool.device, pool.id),
            functools.partial(ctypes.pythonapi.Py_DecRef, ctypes.c_void_p(id(pool.memory_pool))),  # the leaked reference
            forget,
            release,
        ]

    def gives_back(self, segments: Segments) -> bool:
        """Whether retiring a pool with these segments releases memory to the driver."""
        return any(_is_idle(segment) for segment in segments)

    @contextlib.contextmanager
    def capturing(self, memory_pool: Any) -> Iterator[None]:
        """Around a capture into the pool."""
        yield


class ProcessRouting:
    """PyTorch 2.6 and 2.7, where a pool's memory is allocated and freed by the allocator of the thread's active pool.

    Limitations compared with later releases:

    - Allocations of every thread come from the pool while it is routed, and two pools cannot be routed at once. A segment
      that another thread needs is not managed, what the region puts there later is not managed either, and without the
      preload library the pool stays with torch: neither cudaFree nor our allocator can free both kinds. Other threads should
      allocate nothing meanwhile.
    - A region applies to the device that is current when it is entered.
    - Without the preload library, only our emptying releases a pool's idle segments, once it has no tensor left. torch's
      own emptying would call cudaFree on memory that is not cudaMalloc's, so torch must not find them.
    """

    every_thread = True

    def __init__(self, extension: Any, segments_of: Callable[[PoolId], Segments]) -> None:
        self._begin = extension._cuda_beginAllocateToPool
        self._end = extension._cuda_endAllocateCurrentStreamToPool
        self.end_capture: Callable[[int, PoolId], None] = self._end
        self.release: Callable[[int, PoolId], None] = extension._cuda_releasePool
        self._empty_cache = extension._cuda_emptyCache
        self._context = extension._MemPoolContext
        self._segments_of = segments_of
        self._pools: dict[PoolId, tuple[Any, bool]] = {}  # the object, and whether the pool is managed
        self._contexts: dict[tuple[int, PoolId], tuple[int, Any]] = {}  # (device, pool) -> thread, context
        self._given_up: dict[PoolId, int] = {}  # -> device
        self._freeable: set[PoolId] = set()  # given-up pools that were released to torch already
        self._lock = threading.Lock()
        self._warned = False

    def made(self, memory_pool: Any, managed: bool) -> None:
        self._pools[memory_pool.id] = (memory_pool, managed)

    def begin(self, device: int, pool: PoolId) -> None:
        self._begin(device, pool)
        self._contexts[device, pool] = threading.get_ident(), self._context(self._pools[pool][0])

    def end(self, device: int, pool: PoolId) -> None:
        thread, context = self._contexts.pop((device, pool))
        if thread != threading.get_ident():
            # Destroying it here would set this thread's active pool to that of the other thread.
            leak_reference(context)
        del context
        self._end(device, pool)

    def give_up(self, pool: _Pool) -> None:
        pool.memory_pool = None
        managed = self._pools[pool.id][1]
        if _core.preloaded or not managed:  # with the preload library torch calls the interposed cudaFree
            del self._pools[pool.id]
            self.release(pool.device, pool.id)
        else:
            with self._lock:
                self._given_up[pool.id] = pool.device

    def gives_back(self, segments: Segments) -> bool:
        if _core.preloaded:
            return any(_is_idle(segment) for segment in segments)
        return bool(segments) and all(_is_idle(segment) and self._is_ours(segment) for segment in segments)

    def empty_cache(self) -> None:
        """Empties torch's cache, and the given-up pools without a tensor. Not while a pool is routed."""
        try:
            self._empty_cache()
        except RuntimeError as error:
            if _BUSY not in str(error):
                raise
            logger.debug("nothing is emptied while another thread is in a region, or captures a graph")
            return
        with self._lock:
            waiting = list(self._given_up.items())
        for pool, device in waiting:
            self._return(pool, device)

    def _return(self, pool: PoolId, device: int) -> None:
        if pool not in self._freeable:
            if not all(_is_idle(segment) and self._is_ours(segment) for segment in self._segments_of(pool)):
                return
            self._freeable.add(pool)
            self.release(device, pool)
        context = self._context(self._pools[pool][0])
        try:
            self._empty_cache()
        except RuntimeError as error:
            if _BUSY not in str(error):
                raise
            return  # another thread captures or routes now: retried at the next emptying
        finally:
            del context
        with self._lock:
            del self._given_up[pool]
        self._freeable.discard(pool)
        del self._pools[pool]

    def _is_ours(self, segment: dict[str, Any]) -> bool:
        if _core.find(segment["address"]) is not None:
            return True
        if not self._warned:
            self._warned = True
            logger.warning(
                "another thread allocated memory during a region, and it stays with PyTorch, as does that region's: this "
                "release routes the allocations of every thread (2.8 and later do not)"
            )
        return False

    @contextlib.contextmanager
    def capturing(self, memory_pool: Any) -> Iterator[None]:
        context = self._context(memory_pool)
        try:
            yield
        finally:
            del context


def make_routing(torch: Any, version: tuple[int, int], segments_of: Callable[[PoolId], Segments]) -> Any:
    """The routing of this torch.

    Raises:
        TorchUnavailableError: It has no memory pools.
    """
    extension = torch._C
    if hasattr(torch.cuda, "MemPool"):
        if hasattr(extension, "_cuda_beginAllocateCurrentThreadToPool"):
            return ThreadRouting(extension, objects_end_quietly=version >= _OBJECTS_END_QUIETLY)
        if hasattr(extension, "_MemPoolContext"):
            return ProcessRouting(extension, segments_of)
    raise TorchUnavailableError(f"this PyTorch ({torch.__version__}) has no memory pools: {_OLDEST_VERSION} is needed")


def leak_reference(thing: object) -> None:
    """Keeps an object alive through the interpreter's exit. Destroying a MemPool while any pool is routed, for instance at
    the exit of a program that ends inside a region, would abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def drop_reference(thing: object) -> None:
    """Undoes :func:`leak_reference`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def _is_idle(segment: dict[str, Any]) -> bool:
    return all(block["state"] == "inactive" for block in segment["blocks"])
