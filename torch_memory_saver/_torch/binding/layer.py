"""The functions of PyTorch that this package uses: whether it is in use, and its CUDA allocator.

:func:`require` and :func:`require_module` import torch. :func:`loaded` is for processes that may run without torch.

:func:`eager` marks functions that ``torch.compile`` does not trace. Dynamo would otherwise trace into this package and warn
about the native core, which it cannot trace. The mark is that of ``torch.compiler.disable``; the decorator itself would
import much of PyTorch. Dynamo breaks the graph at such a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._patches import replace
from torch_memory_saver._torch.base.steps import SingleUseScope, call_each
from torch_memory_saver._torch.binding.captures import watch_captures
from torch_memory_saver._torch.binding.expandable_segments import cut
from torch_memory_saver._torch.binding.first_use import FirstUse
from torch_memory_saver._torch.binding.releases import OLDEST, is_too_old, version_of, warn_if_untested
from torch_memory_saver._torch.binding.torch_module import import_with_device, is_in_bad_fork
from torch_memory_saver.errors import ForkedProcessError, InvalidStateError, TorchMemorySaverError, TorchUnavailableError

__all__ = [
    "DEFAULT_POOL",
    "PoolId",
    "Routing",
    "TorchCuda",
    "at_first_use",
    "devices_in_use",
    "drop_reference",
    "eager",
    "eager_methods",
    "expandable_segments_on",
    "imported",
    "in_use",
    "leak_reference",
    "loaded",
    "pool_of",
    "require",
    "require_module",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

#: PyTorch's identifier of a pool.
PoolId = tuple[int, int]

#: PyTorch's id of its default pool.
DEFAULT_POOL: PoolId = (0, 0)
#: A pool that never exists: its snapshot has the allocator's settings and no segments.
_NO_POOL: PoolId = (0, (1 << 62) - 1)
#: PyTorch's variable that turns off its caching for the whole process.
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
#: PyTorch's name for an allocator of the program, which has no memory pools.
_OTHER_ALLOCATOR = "pluggable"
_PRELOAD_FOR_OTHER_ALLOCATORS = (
    ', or start the process with the preload library (hook mode "preload"; see configure_subprocess()), whose regions '
    "manage the cudaMalloc of any allocator"
)
#: Number of recorded pools of ordinary memory at which those without memory are forgotten.
_MANY_POOLS = 10_000
#: Since this version a pool with an allocator can be used while expandable segments are on (pytorch issue 147851). Before,
#: PyTorch refuses it (pull request 148378).
_ALLOCATORS_BESIDE_EXPANDABLE = (2, 9)
#: Since this version a MemPool can be destroyed while it has other uses.
_POOL_OBJECTS_END_QUIETLY = (2, 10)
#: Since this version allocations come from the pool routed last; before, from the one routed first (pytorch issue 161193,
#: pull request 168382).
_LAST_ROUTED_WINS = (2, 10)
#: Since this version PyTorch tells routings from captures: while pools are routed, it empties its caches, and a MemPool may
#: be destroyed (pytorch pull request 181830).
_ROUTINGS_ARE_NO_CAPTURES = (2, 13)
#: Since this version each graph has a state of the random generator of its own (pytorch pull request 176752).
_GRAPHS_HAVE_RANDOM_STATES = (2, 13)
#: Since this version a capture inside a region always allocates from the graph's own pool.
_CAPTURES_KEEP_APART = (2, 11)


class TorchCuda:
    """torch.cuda, initialised, and the private functions of its allocator that pools need.

    The functions of ``torch._C`` are used directly because a region must cost microseconds.
    """

    def __init__(self, torch: Any) -> None:
        extension = torch._C
        backend = extension._cuda_getAllocatorBackend()
        if backend == _OTHER_ALLOCATOR:
            raise InvalidStateError(
                "the program has replaced PyTorch's CUDA allocator (change_current_allocator(), as with RMM), and only "
                "PyTorch's own has the memory pools that this needs: keep PyTorch's allocator"
                + ("" if _core.preloaded else _PRELOAD_FOR_OTHER_ALLOCATORS),
                operation="initialize",
            )
        if backend != "native":
            raise InvalidStateError(
                f"PyTorch's {backend} allocator has no memory pools: unset `backend` in PYTORCH_CUDA_ALLOC_CONF and "
                "PYTORCH_ALLOC_CONF",
                operation="initialize",
            )
        version = version_of(torch.__version__)
        if is_too_old(torch.__version__):
            raise TorchUnavailableError(
                f"PyTorch {torch.__version__} is too old: torch_memory_saver needs PyTorch {OLDEST[0]}.{OLDEST[1]} or "
                "newer, whose memory pools serve the thread that uses them"
            )
        warn_if_untested(torch.__version__)
        self.torch = torch
        #: (device, pool id): routes this thread's allocations on the device to the pool.
        self.begin_routing: Callable[[int, PoolId], None] = extension._cuda_beginAllocateCurrentThreadToPool
        #: (device, pool id): ends that routing. The pool keeps one more use than before, which `release_pool` removes.
        self.end_routing: Callable[[int, PoolId], None] = extension._cuda_endAllocateToPool
        self.release_pool: Callable[[int, PoolId], None] = extension._cuda_releasePool
        #: Releases the memory of segments without a tensor.
        self.empty_cache: Callable[[], None] = extension._cuda_emptyCache
        self.pool_objects_end_quietly = version >= _POOL_OBJECTS_END_QUIETLY
        #: Whether an emptying spares PyTorch's own cache while a pool is routed on the device. Otherwise only the end of a
        #: MemPool without other uses releases what is idle in its pool and spares the cache.
        self.routing_spares_cache = version < _ROUTINGS_ARE_NO_CAPTURES
        self.graphs_have_random_states = version >= _GRAPHS_HAVE_RANDOM_STATES
        self.current_device = extension._cuda_getDevice
        self._exchange_device = extension._cuda_maybeExchangeDevice
        # torch.cuda.set_device creates a context even for the current device; the accelerator API does not.
        self._set_device = getattr(extension, "_accelerator_setDeviceIndex", extension._cuda_setDevice)
        self.is_capturing = extension._cuda_isCurrentStreamCapturing
        self._raw_stream = extension._cuda_getCurrentRawStream
        # The counters of torch.cuda.memory_stats. Since 2.13 that function also lists every pool that the process ever had.
        self._memory_stats = getattr(extension, "_accelerator_getDeviceStats", extension._cuda_memoryStats)
        self._memory_snapshot = extension._cuda_memorySnapshot
        # Whether backward() on this thread runs on torch's own threads, one for each device; thread-local in torch.
        self.autograd_threads: Callable[[], bool] = extension._is_multithreading_enabled
        self.set_autograd_threads: Callable[[bool], None] = extension._set_multithreading_enabled
        self.last_routed_wins = version >= _LAST_ROUTED_WINS
        self.captures_join_regions = version < _CAPTURES_KEEP_APART
        self._allocator = _make_allocator(torch, "tms_torch_malloc", "tms_torch_free")
        kind = "default" if _core.preloaded else "ordinary"
        default_allocator = _make_allocator(torch, f"tms_torch_{kind}_malloc", "tms_torch_default_free")
        # A MemPool of memory outside regions is made with these.
        self._default_arguments = (default_allocator.allocator(),) if version >= _ALLOCATORS_BESIDE_EXPANDABLE else ()
        self.begin_routing_of_all_threads: Callable[[int, PoolId], None] = extension._cuda_beginAllocateToPool
        self._making = threading.local()
        #: Pools of ordinary memory that this package has made, such as those of disable(), and that no capture has used.
        self.ordinary_pools: set[PoolId] = set()
        self._enable_caching: Callable[[bool], None] = extension._cuda_cudaCachingAllocator_enable
        # Otherwise each allocation is a cudaMalloc, and no pool is used. PyTorch takes any value of the variable for a yes.
        self.caches = _NO_CACHING not in os.environ

    def allocator(self) -> Any:
        """Return this package's allocator, in the form that torch's pools accept."""
        return self._allocator.allocator()

    def current_stream(self) -> int | None:
        """Return the handle of this thread's current stream on its current device. None while the process does not use that
        device: none of its streams can be capturing, and PyTorch would create a context for the query."""
        device = self.current_device()
        try:
            in_use = _core.active_devices() >> device & 1
        except TorchMemorySaverError:
            in_use = 1  # the call that needs the stream raises the error
        return int(self._raw_stream(device)) if in_use else None

    def _make_current(self, device: int) -> None:
        """Make `device` torch's current one on this thread, without creating a context.

        For a device without a context torch only records it. If the CUDA runtime's device is already this one, torch keeps
        the record of another device, and a second call replaces it.
        """
        self._exchange_device(device)
        if self.current_device() != device:
            self._set_device(device)

    def on_device(self, device: int) -> OnDevice:
        """Return a context manager that makes `device` torch's current one inside, without creating a context."""
        return OnDevice(self, device)

    def make_pool(self, device: int, managed: bool) -> Any:
        """Return a new MemPool of the device for memory of regions (`managed`), or for memory like that of PyTorch's default
        pool. Its reference is leaked until it is retired.

        Both have an allocator of this package, because PyTorch may make expandable segments in a pool without one. It counts
        them when it makes them, gives them back in other pieces, and so destroys a retired pool that still has tensors. In
        2.8, which refuses such a pool while expandable segments are on, only the pools of regions have one.
        """
        if managed:
            return self._new_pool(device, self.allocator())
        memory_pool = self._new_pool(device, *self._default_arguments)
        if len(self.ordinary_pools) >= _MANY_POOLS:
            self.ordinary_pools &= {pool_of(segment) for segment in self.segments()}
        self.ordinary_pools.add(memory_pool.id)
        return memory_pool

    def _new_pool(self, device: int, *arguments: Any) -> Any:
        kind = self.torch.cuda.MemPool
        # The reference is leaked before the pool exists: a signal handler that raises must not destroy it.
        memory_pool = kind.__new__(kind)
        leak_reference(memory_pool)
        self._making.pool = memory_pool
        _core.within(self.on_device(device), memory_pool.__init__, *arguments)
        self._making.pool = None
        return memory_pool

    def set_caching(self, on: bool) -> None:
        """Turn off PyTorch's caching for all threads, or return to what the program has set. Each allocation is a cudaMalloc
        while it is off."""
        self._enable_caching(on and self.caches)

    def watch_caching(self) -> None:
        """Have `caches` follow ``torch.cuda.caching_allocator_enable()``."""
        cuda = self.torch.cuda
        set_by_program: Callable[[bool], None] = cuda.memory.caching_allocator_enable

        @functools.wraps(set_by_program)
        def caching_allocator_enable(value: bool = True) -> None:
            set_by_program(value)
            self.caches = bool(value) and _NO_CACHING not in os.environ

        for module, path in ((cuda.memory, "torch.cuda.memory"), (cuda, "torch.cuda")):
            replace(f"{path}.caching_allocator_enable", module, "caching_allocator_enable", caching_allocator_enable)

    def is_making(self, memory_pool: Any) -> bool:
        """Return whether this package makes the MemPool, on this thread."""
        return getattr(self._making, "pool", None) is memory_pool

    def autograd_on_this_thread(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside which a ``backward()`` of this thread runs on it, not on autograd's own threads,
        which are in no region."""
        manager: contextlib.AbstractContextManager[None] = self.torch.autograd.set_multithreading_enabled(False)
        return manager

    def routed(self, device: int, pool: PoolId) -> Routed:
        """Return a context manager inside which this thread's allocations on the device come from the pool."""
        return Routed(Routing(self, [(device, pool)]))

    def has_our_allocator(self, pool: PoolId, device: int) -> bool:
        """Return whether memory of the pool with that id comes from this package's allocator. Tests it with an allocation,
        with managed settings in force: the native core warns of our allocator outside regions. If nothing else uses the
        pool, the next emptying removes it."""
        routing = Routing(self, [(device, pool)])
        try:
            managed: bool = _core.within(Routed(routing), _core.within, self.on_device(device), self._allocates_managed)
            return managed
        except RuntimeError:
            if routing.has_begun:
                raise
            return False  # routed already, or without users: a capture could not use it either

    def _allocates_managed(self) -> bool:
        address = self.torch.cuda.caching_allocator_alloc(1)
        managed = _core.find(address) is not None
        self.torch.cuda.caching_allocator_delete(address)
        return managed

    @staticmethod
    def uses_of(memory_pool: Any) -> int:
        """Return the number of users of a pool according to torch: its object, routings, graphs. 0 if torch does not report
        it."""
        use_count: Callable[[], int] | None = getattr(memory_pool, "use_count", None)
        return 0 if use_count is None else use_count()

    def releasable_bytes(self, device: int) -> int:
        """Return the bytes of segments on the device that hold no block in use, in every pool.

        Memory reserved by torch is in use, free in a segment that is partly in use, or in completely free segments.
        """
        stats = self._memory_stats(device)
        reserved, active, split = (
            stats[name]["all"]["current"] for name in ("reserved_bytes", "active_bytes", "inactive_split_bytes")
        )
        return int(reserved - active - split)

    def count_frees(self, device: int) -> int:
        """Return the number of tensors' blocks on the device that were ever freed."""
        return int(self._memory_stats(device)["allocation"]["all"]["freed"])

    def reserved_bytes(self, device: int) -> int:
        """Return the bytes of the device's segments in every pool, including paused segments."""
        return int(self._memory_stats(device)["reserved_bytes"]["all"]["current"])

    def ipc_collect(self) -> None:
        """Return memory that was sent to other processes, and that they have dropped, to PyTorch's cache."""
        self.torch.cuda.ipc_collect()

    def synchronize(self, device: int) -> None:
        """Wait for the work of a device in use, which breaks captures."""
        self.torch.cuda.synchronize(device)

    def empty_host_cache(self) -> None:
        """Release PyTorch's idle pinned host memory. Do nothing with releases that cannot."""
        release = getattr(self.torch._C, "_host_emptyCache", None)
        if release is not None:
            release()

    def uuid(self, device: int) -> str:
        """Return the UUID of a device, as NVML writes it; "" with releases of PyTorch that do not have it."""
        uuid = getattr(self.torch.cuda.get_device_properties(device), "uuid", None)
        return "" if uuid is None else f"GPU-{uuid}"

    def summary(self, device: int) -> str:
        """Return the text of torch.cuda.memory_summary."""
        return str(self.torch.cuda.memory_summary(device))

    def memory_stats(self, device: int) -> dict[str, Any]:
        """Return the counters of torch.cuda.memory_stats of a device in use, as nested dicts, but no counters of pools."""
        stats: dict[str, Any] = self._memory_stats(device)
        return stats

    def segments(self, pool: PoolId = DEFAULT_POOL) -> list[dict[str, Any]]:
        """Return the segments of one pool on every device. With the default pool's id, return the segments of every pool.
        Each is one managed allocation, or ordinary memory: expandable segments are cut into such pieces."""
        segments = self.whole_segments(pool)
        if any(segment.get("is_expandable") for segment in segments):
            return cut(segments, _core.segments())
        return segments

    def whole_segments(self, pool: PoolId = DEFAULT_POOL) -> list[dict[str, Any]]:
        """Return the same segments as PyTorch lists them."""
        segments: list[dict[str, Any]] = self._snapshot(pool)["segments"]
        return segments

    def settings(self) -> dict[str, Any]:
        """Return the allocator's settings in force; empty if torch does not report them."""
        settings: dict[str, Any] = self._snapshot(_NO_POOL).get("allocator_settings", {})
        return settings

    def _snapshot(self, pool: PoolId) -> Any:
        try:
            return self._snapshot_of((*pool, False))
        except (TypeError, ValueError, RuntimeError):
            pass  # an older torch: the argument is only the pool's id
        try:
            return self._snapshot_of(pool)
        except (TypeError, ValueError, RuntimeError):
            pass  # an even older torch: no argument
        try:
            snapshot = dict(self._memory_snapshot(None))
        except TypeError:
            snapshot = dict(self._memory_snapshot())
        if pool != DEFAULT_POOL:
            snapshot["segments"] = [row for row in snapshot["segments"] if tuple(row.get("segment_pool_id", ())) == pool]
        return snapshot

    def _snapshot_of(self, argument: tuple[int, ...]) -> Any:
        # torch 2.11 releases a reference to each element at every call that it does not own. Without an additional
        # reference, the numbers of pools in use, and False, would be destroyed after some thousand calls. With a correct
        # torch this only leaks an int.
        for element in argument:
            leak_reference(element)
        return self._memory_snapshot(argument)


class Routing:
    """The routing of one thread's allocations to some pools, one of each device. Begun once and ended once; both can be
    interrupted by a signal handler that raises, and repeated."""

    __slots__ = ("_begun", "_pools", "_steps", "_torch")

    def __init__(self, torch: TorchCuda, pools: list[tuple[int, PoolId]]) -> None:
        self._torch = torch
        self._pools = pools
        self._begun: list[None] = []
        self._steps: Iterator[functools.partial[Any]] | None = None  # the remaining ones of the end

    @property
    def is_ending(self) -> bool:
        return self._steps is not None

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def begin(self) -> None:
        """Route the thread's allocations. If PyTorch refuses one of the pools, those before it stay routed."""
        _core.record_each(self._begun, self._torch.begin_routing, self._pools[len(self._begun) :])

    def end(self) -> None:
        """End what has begun, from any thread. If PyTorch refuses it for one pool, a repetition continues with the next."""
        if self._steps is None:
            pools, partial = self._pools[: len(self._begun)], functools.partial
            ends = [partial(self._torch.end_routing, *pool) for pool in pools]
            self._steps = iter(ends + [partial(self._torch.release_pool, *pool) for pool in pools])
        call_each(self._steps)


class Routed(SingleUseScope):
    """The context manager of :meth:`TorchCuda.routed`."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def _begin(self) -> None:
        self._routing.begin()

    def _end(self) -> None:
        self._routing.end()


class OnDevice(SingleUseScope):
    """The context manager of :meth:`TorchCuda.on_device`."""

    def __init__(self, torch: TorchCuda, device: int) -> None:
        self._torch = torch
        self._device = device
        self._before = torch.current_device()

    def _begin(self) -> None:
        if self._before != self._device:
            self._torch._make_current(self._device)

    def _end(self) -> None:
        if self._torch.current_device() != self._before:
            self._torch._make_current(self._before)


def _make_allocator(torch: Any, allocate: str, free: str) -> Any:
    """Make torch's object for two functions of the native core. Never freed: torch calls it for segments that outlive it."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_core.library_path, allocate, free)
    leak_reference(allocator)
    return allocator


_torch_cuda: TorchCuda | None = None  # once all steps of the first use have returned
_at_first_use: list[Callable[[Any], None]] = []


def at_first_use(callback: Callable[[Any], None]) -> None:
    """Call `callback` with the module torch when this package begins to use torch.cuda, and again in a forked child. It is
    repeated after an exception."""
    _at_first_use.append(callback)


def imported() -> Any:
    """Return the module torch if it is imported, else None. Another thread may be importing it right now."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "cuda") and hasattr(torch, "__version__") else None


def loaded() -> TorchCuda | None:
    """Return torch.cuda, initialised if necessary; None if torch is not loaded or finds no CUDA device, or if the program
    has replaced PyTorch's allocator: then nothing that this package does with PyTorch applies."""
    if _torch_cuda is not None:
        return _torch_cuda
    torch = imported()
    if torch is None or not torch.cuda.is_available() or _has_other_allocator(torch):
        return None
    return _initialize(torch)


def _has_other_allocator(torch: Any) -> bool:
    backend: Callable[[], str] | None = getattr(torch._C, "_cuda_getAllocatorBackend", None)
    return backend is not None and backend() == _OTHER_ALLOCATOR


def in_use() -> TorchCuda | None:
    """Return torch.cuda if this process uses it already, else None."""
    if _torch_cuda is not None:
        return _torch_cuda
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return loaded() if hasattr(cuda, "is_initialized") and cuda.is_initialized() else None


def require() -> TorchCuda:
    """Return torch.cuda, imported and initialised if necessary.

    Raises:
        TorchUnavailableError: torch is not installed, finds no CUDA device, or has no memory pools.
        ForkedProcessError: This process was forked from one that used CUDA.
    """
    if _torch_cuda is not None:
        return _torch_cuda
    return _initialize(import_with_device(', or use the preload library (hook mode "preload")'))


def require_module() -> Any:
    """Return the module torch with CUDA initialised, imported if necessary; for functions that need no memory pools.

    Raises:
        TorchUnavailableError: torch is not installed, or finds no CUDA device.
        ForkedProcessError: This process was forked from one that used CUDA.
    """
    torch = import_with_device()
    _initialize_cuda(torch)
    return torch


def _initialize(torch: Any) -> TorchCuda:
    global _torch_cuda
    _initialize_cuda(torch)
    torch_cuda = _first_use.proceed(torch)
    if _first_use.is_complete:  # otherwise a callback of at_first_use() is the caller
        _torch_cuda = torch_cuda
    return torch_cuda


def _steps(torch_cuda: TorchCuda) -> list[Callable[[], object]]:
    """Return the steps of the first use. Captures are watched first, because a pause must not unmap memory during one."""
    if _core.get_disabled():
        return []
    callbacks = [functools.partial(callback, torch_cuda.torch) for callback in (watch_captures, *_at_first_use)]
    return [callbacks[0], torch_cuda.watch_caching, *callbacks[1:]]


def _new_first_use() -> FirstUse[TorchCuda]:
    return FirstUse(lambda torch: TorchCuda(torch), _steps)


_first_use = _new_first_use()


def _initialize_cuda(torch: Any) -> None:
    try:
        torch.cuda.init()
    except RuntimeError as error:
        kind = ForkedProcessError if is_in_bad_fork(torch) else TorchUnavailableError
        raise kind(f"PyTorch could not initialise CUDA: {error}", operation="initialize") from error


def after_fork_in_child() -> None:
    """Forget the parent's torch.cuda, which a forked child cannot use. The next use raises an error with the reason."""
    global _torch_cuda, _first_use
    _torch_cuda = None
    _first_use = _new_first_use()


def expandable_segments_on(environment: Mapping[str, str]) -> bool:
    """Return whether PyTorch's expandable segments are on: according to its settings if it is in use, else to its
    variables."""
    torch_cuda = in_use()
    if torch_cuda is not None:
        return bool(torch_cuda.settings().get("expandable_segments", False))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for entry in environment.get(name, "").split(","):
            key, _, value = entry.partition(":")
            if key.strip() == "expandable_segments":
                return value.strip().lower() == "true"
    return False


def devices_in_use() -> list[int]:
    """Return the devices on which this process has a context. PyTorch holds no memory of others."""
    mask = _core.active_devices()
    return [device for device in range(mask.bit_length()) if mask >> device & 1]


def pool_of(segment: Mapping[str, Any]) -> PoolId:
    """Return the pool of a segment in PyTorch's list."""
    pool = segment.get("segment_pool_id", DEFAULT_POOL)
    return (pool[0], pool[1])


def leak_reference(thing: object) -> None:
    """Keep an object alive through the interpreter's exit. Destroying a MemPool while any pool is routed, for instance at
    the exit of a program that ends inside a region, would abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def drop_reference(thing: object) -> None:
    """Undo :func:`leak_reference`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def eager(function: _Function) -> _Function:
    """Mark a function that ``torch.compile`` does not trace."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "torch_memory_saver cannot be part of a graph: use it outside of the function"
    return function


def eager_methods(cls: _Class) -> _Class:
    """Mark every method and property that a class itself defines."""
    for attribute in vars(cls).values():
        functions = (attribute.fget, attribute.fset) if isinstance(attribute, property) else (attribute,)
        for function in functions:
            if isinstance(function, type(eager)):
                eager(function)
    return cls
