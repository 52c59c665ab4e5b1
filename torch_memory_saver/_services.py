"""What the engine publishes for features, which import nothing else of it and of PyTorch's side.

Features (layer_graphs, nccl, ranks, simulate, vllm, and events and memory of observe) use the public class, the reports and
options, and these names. They do not use each other. `make lint` checks all of that.
"""

from torch_memory_saver._engine.background import Periodic, after_call, before_pause
from torch_memory_saver._engine.engine import check_pause, check_resume
from torch_memory_saver._engine.graph_pool import GraphPool
from torch_memory_saver._engine.hooks import HookCall
from torch_memory_saver._engine.hooks import register as register_hook
from torch_memory_saver._engine.preload import library_path as preload_library_path
from torch_memory_saver._engine.variables import driver_library, path_at_import
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver._torch.binding.history import History, current_history, is_recording, record_history, stop_history
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.distributed import nccl_communicators
from torch_memory_saver._torch.distributed.process_groups import GroupOfRanks, group_of_ranks
from torch_memory_saver._torch.memory.ordinary_memory import DeviceMemory, device_memory

__all__ = [
    "DeviceMemory",
    "GraphPool",
    "GroupOfRanks",
    "History",
    "HookCall",
    "Periodic",
    "PoolId",
    "TorchCuda",
    "after_call",
    "before_pause",
    "capture_gate",
    "check_pause",
    "check_resume",
    "current_history",
    "device_memory",
    "devices_in_use",
    "driver_library",
    "group_of_ranks",
    "is_recording",
    "layer",
    "nccl_communicators",
    "path_at_import",
    "preload_library_path",
    "record_history",
    "register_hook",
    "stop_history",
]
