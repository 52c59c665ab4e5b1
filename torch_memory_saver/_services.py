"""The names that features and observers may import from the engine and from ``_torch``.

Besides these names they use only the public class, the reports and the options. `make lint` checks that.
"""

from torch_memory_saver._engine import preload, variables
from torch_memory_saver._engine.background import Periodic, after_call, before_pause, debug_folder, requested_recordings
from torch_memory_saver._engine.calls.hooks import HookCall
from torch_memory_saver._engine.calls.hooks import register as register_hook
from torch_memory_saver._engine.graph_pool import GraphPool
from torch_memory_saver._engine.native_log import log_info
from torch_memory_saver._engine.preparation import check_pause, check_resume
from torch_memory_saver._engine.process import count_idle_bytes
from torch_memory_saver._engine.tensors.lookup import storages_of
from torch_memory_saver._engine.variables import driver_library, path_at_import
from torch_memory_saver._torch.base.steps import InterruptSafeLock, SingleUseScope
from torch_memory_saver._torch.binding import layer, releases
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver._torch.binding.history import (
    History,
    current_history,
    is_recording,
    may_have_native_frames,
    record_history,
    stop_history,
)
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.binding.torch_module import import_torch
from torch_memory_saver._torch.distributed import nccl_communicators
from torch_memory_saver._torch.distributed.process_groups import GroupOfRanks, group_of_ranks
from torch_memory_saver._torch.memory.ordinary_memory import DeviceMemory, OrdinaryMemory, device_memory, ordinary_memory

__all__ = [
    "DeviceMemory",
    "GraphPool",
    "GroupOfRanks",
    "History",
    "HookCall",
    "InterruptSafeLock",
    "OrdinaryMemory",
    "Periodic",
    "PoolId",
    "SingleUseScope",
    "TorchCuda",
    "after_call",
    "before_pause",
    "capture_gate",
    "check_pause",
    "check_resume",
    "count_idle_bytes",
    "current_history",
    "debug_folder",
    "device_memory",
    "devices_in_use",
    "driver_library",
    "group_of_ranks",
    "import_torch",
    "is_recording",
    "layer",
    "log_info",
    "may_have_native_frames",
    "nccl_communicators",
    "ordinary_memory",
    "path_at_import",
    "preload",
    "record_history",
    "register_hook",
    "releases",
    "requested_recordings",
    "stop_history",
    "storages_of",
    "variables",
]
