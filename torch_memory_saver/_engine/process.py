"""The state of this process: its pools, sent memory, preserved and managed tensors; and its reset in a forked child."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._additions import added
from torch_memory_saver._engine.calls.pending import PendingResumes
from torch_memory_saver._engine.region import Region
from torch_memory_saver._engine.tensors.managed_modules import ManagedModules
from torch_memory_saver._engine.tensors.preserved import Preserved
from torch_memory_saver._engine.variables import init_enabled
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.captures import before_capture, capture_gate
from torch_memory_saver._torch.distributed import symmetric_memory
from torch_memory_saver._torch.graphs.cuda_graph import GraphPools
from torch_memory_saver._torch.graphs.kept_objects import BlasWorkspaces, OrdinaryPools, RandomStates
from torch_memory_saver._torch.memory import cache_wrappers
from torch_memory_saver._torch.memory.live_blocks import ResumedBlocks
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.pools.late_devices import LateDevices
from torch_memory_saver._torch.routing import program_pools
from torch_memory_saver._torch.sharing import sent_memory
from torch_memory_saver._torch.sharing.sent_memory import SharedMemory
from torch_memory_saver.options import RegionOptions

__all__ = [
    "blas_workspaces",
    "count_idle_bytes",
    "graph_pools",
    "install_sharing",
    "late_devices",
    "managed_modules",
    "pending_resumes",
    "pool_store",
    "preserved",
    "resumed_blocks",
    "shared_memory",
]


def _ordinary_memory() -> contextlib.AbstractContextManager[None]:
    """Return a context manager inside which this thread's allocations are not managed."""
    current = _core.region_current()
    if not current.managed:
        return contextlib.nullcontext()
    return Region(pool_store, layer.loaded, RegionOptions.disabled(current.tag))


#: The objects of this process.
pool_store = PoolStore()
graph_pools = GraphPools(pool_store)
ordinary_pools = OrdinaryPools(pool_store)
blas_workspaces = BlasWorkspaces(ordinary_pools)
random_states = RandomStates(ordinary_pools)
shared_memory = SharedMemory(_ordinary_memory)
late_devices = LateDevices()
preserved = Preserved()
managed_modules = ManagedModules()
resumed_blocks = ResumedBlocks()
pending_resumes = PendingResumes()


def install_sharing(torch: Any) -> None:
    sent_memory.install(torch, shared_memory)


def _watch_late_devices(torch: Any) -> None:
    torch_cuda = layer.loaded()
    if torch_cuda is not None:
        late_devices.begin(torch_cuda)


def _watch_program_pools(torch: Any) -> None:
    torch_cuda = layer.loaded()
    if torch_cuda is not None:
        program_pools.install(torch_cuda, pool_store.regions, init_enabled())


def _begin_additions(torch: Any) -> None:
    for begin in added("first use of torch").values():
        begin(torch)


layer.at_first_use(install_sharing)
layer.at_first_use(_watch_late_devices)
layer.at_first_use(_watch_program_pools)
layer.at_first_use(lambda torch: cache_wrappers.install(pool_store))
layer.at_first_use(lambda torch: symmetric_memory.install(pool_store.regions))
layer.at_first_use(blas_workspaces.begin)
layer.at_first_use(random_states.begin)
layer.at_first_use(_begin_additions)
before_capture.extend((blas_workspaces.capture_begins, random_states.capture_begins))


def count_idle_bytes(torch: layer.TorchCuda, device: int) -> int:
    """Return the bytes of the device that ``empty_cache()`` of this thread would give back."""
    return cache_wrappers.count_idle_bytes(torch, pool_store, device)


def _after_fork_in_child() -> None:
    layer.after_fork_in_child()
    capture_gate.after_fork_in_child()
    pool_store.after_fork_in_child()
    graph_pools.after_fork_in_child()
    ordinary_pools.after_fork_in_child()
    shared_memory.after_fork_in_child()
    late_devices.after_fork_in_child()
    preserved.after_fork_in_child()
    resumed_blocks.after_fork_in_child()
    pending_resumes.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
