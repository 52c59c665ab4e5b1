"""Old helpers: see compat.py."""

from torch_memory_saver.compat import change_env, get_binary_path_from_package

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]


def is_xpu() -> bool:
    """Whether this is Intel's kind of GPU, which this package does not support."""
    return False
