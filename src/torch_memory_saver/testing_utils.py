"""Old helpers of test programs: see compat.py."""

from torch_memory_saver import _core, torch_layer

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device"]


def get_device() -> str:
    """The name of torch's device type."""
    return "cuda"


def empty_cache() -> None:
    """``torch.cuda.empty_cache()``."""
    torch_layer.require().torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Prints and returns the bytes in use on a device, by every process."""
    free, total = _core.device_memory(gpu_id)
    print(f"GPU memory: {(total - free) / (1 << 30):.2f} GiB ({message})", flush=True)
    return total - free
