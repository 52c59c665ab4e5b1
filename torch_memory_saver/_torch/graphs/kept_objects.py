"""The objects that PyTorch keeps and shares between the memory of all tags, and ordinary memory that is used for nothing
else.

PyTorch allocates such an object from the pool that is in force on the thread when it is first needed. Here this thread
allocates from a pool of ordinary memory, whether it is in a region or not, and whether ``TMS_INIT_ENABLE`` manages PyTorch's
own pool or not. These pools are never retired. So PyTorch neither gives their free blocks back to the driver nor hands them
out for anything else: the addresses of an object that was freed stay valid, which captured graphs rely on.

A pool is routed by one thread at a time. Threads that need one at the same time use different pools. There is no lock: a
list of idle pools changes by single operations.

**The workspaces of cuBLAS.** PyTorch has a workspace for each thread and stream that has multiplied matrices, and a smaller
one for cuBLASLt. It allocates them at the first use, from the pool that is in force then, and keeps them. A workspace that
was allocated inside a region lies in the memory of the region's tag. After a pause of the tag, the next product of that
thread on that stream would be an illegal access, which loses the context, although the program uses no memory of the tag.
PyTorch does not report where workspaces lie, and can only free all of them at once. So there are two rules:

1. **A pause frees the workspaces** if one may lie in memory that it is about to unmap: a live block there has the size of a
   workspace. (It may as well be a tensor. Then nothing there becomes free, and nothing is lost but an allocation.) The
   workspaces of the current stream are made again in ordinary memory at once. PyTorch makes any other workspace at the next
   use of its thread and stream.
2. **A capture begins with new workspaces**, because a captured graph keeps the address of the workspace that it uses, and
   PyTorch does not know of that. All are freed, and those of the capture's stream are made in a pool that is used for
   nothing else: for the capturing thread and, where gradients are enabled, for autograd's. If a pause frees them, their
   memory stays mapped, and only another workspace of the same stream can get it. The contents do not outlive an operator.
   Other threads and streams that take part in the capture get their workspaces inside it, from the
   graph's own pool, which lives as long as the graph and is paused with it.

So freeing workspaces never takes memory from a graph, and a graph whose own memory is resident can be replayed while
anything else is paused. The exception are graphs captured before this package was first used, to which the second rule did
not apply. While one of them lives, neither a pause nor a capture frees a workspace. If another graph is captured then,
no workspace is ever freed again. If a pause then finds a block of the size of a workspace, it logs a warning: it cannot know
whether the block is one, so it does not fail.

A thread that never used cuBLAS does not initialise it here. Entering a region costs nothing. A pause looks only where a
region of its tags was entered since the last one (Regions.take_entered), or where PyTorch's own pool is managed. This
module has no lock of its own. It calls PyTorch, so no lock of the package may be held.

**The states of random numbers** on a device:

- The seed and the offset of a device's generator, for captured graphs. PyTorch writes to them before each replay. Before
  2.13 all graphs of a generator share them, and PyTorch allocates them when a capture begins and no graph of the generator
  exists. Since 2.13 each graph has its own, outside of its pool. 2.13 allocates them before it routes that pool, and later
  releases where the capture first takes a random number.
- cuDNN's state for the dropout of recurrent networks. PyTorch allocates it at the first use of a device, and again after
  the generator was seeded, and uses it for every network.

Inside a region, or where ``TMS_INIT_ENABLE`` manages everything, they would be paused with a tag, and other graphs and
networks would access paused memory. So both are allocated in ordinary memory. Elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import re
import threading
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import note_operator
from torch_memory_saver._torch.base import region_settings
from torch_memory_saver._torch.base.steps import InterruptSafeExitStack, SingleUseScope
from torch_memory_saver._torch.binding.layer import TorchCuda, devices_in_use, eager, in_use
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.pool import Key, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions

__all__ = ["BlasWorkspaces", "OrdinaryPools", "RandomStates", "workspace_sizes"]

logger = logging.getLogger("torch_memory_saver")

_MAY_BE_MANAGED = "the state of the random generator for graphs may lie in managed memory: %s"

_OPTIONS = RegionOptions.disabled(DEFAULT_TAG)
_KIB = 1024
#: PyTorch's sizes without CUBLAS_WORKSPACE_CONFIG: for compute capability 9.0 and, in some releases, later ones; for others.
_DEFAULT_SIZES = (32 * _KIB * _KIB, 4096 * _KIB * 2 + 16 * _KIB * 8)
#: PyTorch's size for cuBLASLt without CUBLASLT_WORKSPACE_SIZE.
_DEFAULT_LT_SIZE = 1024 * _KIB
_CHUNKS = re.compile(r":([0-9]+):([0-9]+)")
#: PyTorch's operator that allocates cuDNN's state, and the dispatch key under which it selects the device.
_OPERATOR, _KEY = "_cudnn_init_dropout_state", "BackendSelect"


class OrdinaryPools:
    """The pools of the process. Any thread may call."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._idle: dict[int, list[Pool]] = {}

    def after_fork_in_child(self) -> None:
        """Forget the parent's pools, which a forked child cannot use."""
        self._idle = {}

    def routed(self, torch: TorchCuda, device: int) -> _OutsideRegions:
        """Return a context manager inside which this thread's allocations on the device come from a pool of ordinary memory,
        and its regions are not in force."""
        return _OutsideRegions(self._store, self._idle.setdefault(device, []), torch, device)


class _OutsideRegions(SingleUseScope):
    """The context manager of :meth:`OrdinaryPools.routed`. `idle` are the pools of the device that no thread uses."""

    def __init__(self, store: PoolStore, idle: list[Pool], torch: TorchCuda, device: int) -> None:
        self._store = store
        self._idle = idle
        self._torch = torch
        self._device = device
        self._taken: list[Pool] = []
        self._entered = InterruptSafeExitStack()

    def _begin(self) -> None:
        torch, device = self._torch, self._device
        self._store.outside_memory.note_ordinary()
        try:
            _core.move(self._idle, self._taken)
        except IndexError:
            _core.record_each(self._taken, self._store.idle_pools.make_pool, [(torch, Key(_OPTIONS, device))])
        self._entered.enter(region_settings.RegionSettings(_OPTIONS))
        if not torch.last_routed_wins:
            self._entered.enter(self._store.regions.routing_suspended(torch))
        self._entered.enter(torch.routed(device, self._taken[0].id))

    def _end(self) -> None:
        self._entered.leave()
        if self._taken:
            _core.move(self._taken, self._idle)


def workspace_sizes() -> frozenset[int]:
    """Return the sizes in bytes that PyTorch may request for a workspace in this process."""
    chunks = _CHUNKS.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    sizes = [sum(int(size) * _KIB * int(count) for size, count in chunks)] if chunks else [*_DEFAULT_SIZES]
    text = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "").strip()
    return frozenset((*sizes, int(text) * _KIB if text.isdecimal() else _DEFAULT_LT_SIZE))


class BlasWorkspaces:
    """PyTorch's workspaces in this process. Any thread may call."""

    def __init__(self, pools: OrdinaryPools) -> None:
        self._pools = pools
        self._local = threading.local()
        self._early_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._late_graphs_as_well = False  # graphs were captured while an early one lived, with workspaces of any age
        self._warned = False

    def begin(self, torch: Any) -> None:
        """Find the graphs that were captured before, if the process uses a device already. To be called with the module
        torch when this package begins to use it."""
        graph_class = getattr(torch._C, "_CUDAGraph", None)
        if graph_class is not None and devices_in_use():
            graphs = [each for each in gc.get_objects() if issubclass(type(each), graph_class)]
            self._early_graphs = weakref.WeakSet(graph for graph in graphs if _is_captured(graph))

    def free_in(self, torch: TorchCuda, store: PoolStore, tags: Tags, default_pool_managed: bool) -> None:
        """Free the workspaces if one may lie in memory that a pause of `tags` is about to unmap, and make the one of this
        thread's current stream again if it did. To be called after threads in regions of the tags were refused."""
        if not (store.regions.take_entered(tags) or default_pool_managed) or not _has_workspaces(torch):
            return
        found = _blocks_that_may_be_workspaces(torch, tags)
        if not found:
            return
        if self._early_graphs or self._late_graphs_as_well:
            self._warn_of_early_graphs(len(found))
            return
        device = torch.current_device()
        if not _free(torch):
            return
        freed = found.keys() - _blocks_that_may_be_workspaces(torch, tags).keys()
        logger.debug("pause: %d workspaces of cuBLAS lay in memory that is about to be paused", len(freed))
        if (device, torch.current_stream()) in {found[address] for address in freed}:
            self._make(torch, device)

    def capture_begins(self, device: int) -> None:
        """Renew the workspaces for a capture that is about to begin on this thread's current stream, if PyTorch has any."""
        torch = in_use()
        if torch is None or getattr(self._local, "renewed", False):
            return
        try:
            if self._free_for_capture(torch):
                self._make_for_capture(torch, device)
        except RuntimeError as error:
            logger.debug("the capture makes its workspaces of cuBLAS itself: %s", error)

    def renewed(self, torch: TorchCuda, stream: Any) -> _Renewed:
        """Return a context manager that renews the workspaces for a capture on `stream` that begins inside. They are made
        even if PyTorch has none, so that none lies in the graph's pool."""
        return _Renewed(self, torch, stream)

    def make_again(self, torch: TorchCuda, device: int) -> None:
        """Make the workspaces again that pauses of other threads have freed since :meth:`renewed` made them. To be called
        when such pauses are refused, with the capture's stream as the current one."""
        self._make_for_capture(torch, device)

    def _free_for_capture(self, torch: TorchCuda) -> bool:
        """Free all workspaces, unless that would take one from a graph. Return whether there were any."""
        if self._early_graphs:
            self._late_graphs_as_well = True
        if self._early_graphs or self._late_graphs_as_well or not _has_workspaces(torch):
            return False
        return _free(torch)

    def _make_for_capture(self, torch: TorchCuda, device: int) -> None:
        """Make the workspaces of the current stream for this thread and, where gradients are enabled, for autograd's."""
        self._make(torch, device)
        if torch.torch.is_grad_enabled():
            _call_in_backward(torch.torch, device, lambda: self._make(torch, device))

    def _make(self, torch: TorchCuda, device: int) -> None:
        """Make the workspace of this thread and its current stream, unless PyTorch has it. If that fails, PyTorch makes it
        at its next use."""
        try:
            if not _has_workspaces(torch):
                torch.torch.cuda.current_blas_handle()
            elif _core.device_memory(device).free > 2 * max(workspace_sizes()):
                _core.within(self._pools.routed(torch, device), torch.torch.cuda.current_blas_handle)
        except (TorchMemorySaverError, RuntimeError) as error:
            logger.debug("PyTorch makes the workspace of cuBLAS itself: %s", error)

    def _warn_of_early_graphs(self, count: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%d block(s) of the memory that is being paused may be workspaces of cuBLAS. They cannot be replaced, "
                "because CUDA graphs may refer to them: %d that were captured before the first use of torch_memory_saver, "
                "and those captured since then. While this memory is paused, multiply no matrices on threads and streams "
                "that did so for the first time inside a region. Better: enter a region before you capture the first graph",
                count,
                len(self._early_graphs),
            )


def _has_workspaces(torch: TorchCuda) -> bool:
    """Return whether PyTorch may have workspaces and can free them."""
    return hasattr(torch.torch._C, "_cuda_clearCublasWorkspaces")


def _free(torch: TorchCuda) -> bool:
    """Free all workspaces. Return whether there were any."""
    before = _allocated_bytes(torch)
    torch.torch._C._cuda_clearCublasWorkspaces()
    return _allocated_bytes(torch) < before


def _allocated_bytes(torch: TorchCuda) -> int:
    return sum(torch.memory_stats(device)["allocated_bytes"]["all"]["current"] for device in devices_in_use())


def _blocks_that_may_be_workspaces(torch: TorchCuda, tags: Tags) -> dict[int, tuple[int, int]]:
    """Return the address of each block of memory of `tags` that has the size of a workspace, with its device and stream."""
    active = sorted(row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag))
    if not active:
        return {}
    sizes = workspace_sizes()
    return {
        block["address"]: (segment["device"], segment["stream"])
        for segment in torch.whole_segments()  # a block may lie in several pieces of an expandable segment
        if _is_any_between(active, segment["address"], segment["address"] + segment["total_size"])
        for block in segment["blocks"]
        if block["requested_size"] in sizes and block["state"] != "inactive"
    }


def _is_any_between(addresses: list[int], begin: int, end: int) -> bool:
    """Return whether one of the sorted addresses lies in [begin, end)."""
    index = bisect_left(addresses, begin)
    return index < len(addresses) and addresses[index] < end


def _is_captured(graph: Any) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _call_in_backward(torch: Any, device: int, call: Callable[[], None]) -> None:
    """Call `call` on autograd's thread of the device, or on this thread if backward() runs here, with the stream that is
    current now."""

    class InBackward(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, nothing: Any) -> Any:
            return nothing.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            torch.zeros((), device=gradient.device)  # makes the device's context current, or cuBLAS would make PyTorch warn
            call()
            return gradient

    # A tensor without memory: autograd's thread drops the gradients after grad() has returned, perhaps in a capture, and a
    # capture ends the process if a thread frees memory that PyTorch does not cache.
    nothing = torch.zeros(0, device=f"cuda:{device}", requires_grad=True)
    torch.autograd.grad(InBackward.apply(nothing), nothing, nothing.detach())


class _Renewed(SingleUseScope):
    """The context manager of :meth:`BlasWorkspaces.renewed`."""

    def __init__(self, workspaces: BlasWorkspaces, torch: TorchCuda, stream: Any) -> None:
        self._workspaces = workspaces
        self._torch = torch
        self._stream = stream

    def _begin(self) -> None:
        with self._torch.torch.cuda.stream(self._stream):
            self._workspaces._free_for_capture(self._torch)
            self._workspaces._make_for_capture(self._torch, self._stream.device_index)
        self._workspaces._local.renewed = True

    def _end(self) -> None:
        self._workspaces._local.renewed = False


class _StateForCapture(SingleUseScope):
    """A context manager inside which a capture is to begin, so that the state of the device's generator for it is allocated
    in ordinary memory: when the capture begins or, if PyTorch waits for the first random number, right afterwards."""

    def __init__(self, outside: _OutsideRegions, torch: TorchCuda, generator: Any) -> None:
        self._outside = outside
        self._torch = torch
        self._generator = generator
        self._entered = InterruptSafeExitStack()

    def _begin(self) -> None:
        self._entered.enter(self._outside)

    def _end(self) -> None:
        try:
            if hasattr(self._generator, "philox_state") and self._torch.is_capturing():
                self._generator.philox_state(0)  # takes no random numbers, and adds nothing to the graph
        except RuntimeError as error:  # the capture has begun, and goes on
            logger.debug(_MAY_BE_MANAGED, error)
        finally:
            self._entered.leave()


class RandomStates:
    """The two states in this process. Any thread may call."""

    def __init__(self, pools: OrdinaryPools) -> None:
        self._pools = pools
        self._library: Any = None  # owns the replaced operator

    def capture_begins(self, device: int) -> contextlib.AbstractContextManager[Any] | None:
        """Return a context manager inside which a capture is to begin, so that the state of the device's generator for it
        lies in ordinary memory."""
        torch = in_use()
        if torch is None or not _core.region_current().managed:
            return None
        try:
            generator = torch.torch.cuda.default_generators[device]
            if torch.graphs_have_random_states:
                return _StateForCapture(self._pools.routed(torch, device), torch, generator)
            graph = torch.torch.cuda.CUDAGraph()
            _core.within(self._pools.routed(torch, device), graph.register_generator_state, generator)
            return contextlib.nullcontext(graph)  # the state stays as long as this or another graph lives
        except (AttributeError, TorchMemorySaverError, RuntimeError) as error:
            logger.debug(_MAY_BE_MANAGED, error)
            return None

    def begin(self, torch: Any) -> None:
        """Replace the operator that allocates cuDNN's state, once. To be called with the module torch."""
        if self._library is not None or not hasattr(torch.ops.aten, _OPERATOR):
            return
        allocate = getattr(torch.ops.aten, _OPERATOR).default
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

        def allocate_state(*arguments: Any, **keywords: Any) -> Any:
            found = in_use()
            if found is None or not _core.region_current().managed:
                return allocate.redispatch(keys, *arguments, **keywords)
            call = functools.partial(allocate.redispatch, keys, *arguments, **keywords)
            return _core.within(self._pools.routed(found, _device_of(found, keywords.get("device"))), call)

        try:
            self._library = _replace(torch, eager(allocate_state))
            note_operator(f"aten::{_OPERATOR}", self._library)
        except (AttributeError, RuntimeError) as error:
            logger.debug("cuDNN's state for dropout may lie in managed memory: %s", error)


def _device_of(torch: TorchCuda, device: Any) -> int:
    index: int | None = getattr(device, "index", None)
    return torch.current_device() if index is None else index


def _replace(torch: Any, function: Callable[..., Any]) -> Any:
    library = torch.library.Library("aten", "IMPL")
    # Releases of PyTorch without this argument allow the override by default.
    allowed = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of a replaced operator
        library.impl(_OPERATOR, function, _KEY, **allowed)
    return library
