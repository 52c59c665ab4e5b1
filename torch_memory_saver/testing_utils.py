"""Old helpers of test programs: see _compat/cpp_package.py."""

from torch_memory_saver import _core
from torch_memory_saver._torch import layer
from torch_memory_saver.utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """The name of torch's device type."""
    return "cuda"


def empty_cache() -> None:
    """``torch.cuda.empty_cache()``."""
    layer.require().torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Prints and returns the bytes in use on a device, by every process."""
    used = _xpu_used_memory(gpu_id)
    print(f"GPU memory: {used / (1 << 30):.2f} GiB ({message})", flush=True)
    return used


def _xpu_used_memory(gpu_id: int = 0) -> int:
    """The bytes in use on a device, by every process. The name is the C++ package's; the devices are CUDA's."""
    memory = _core.device_memory(gpu_id)
    return memory.total - memory.free
