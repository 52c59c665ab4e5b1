"""An old import path: see compat.py."""

from torch_memory_saver.compat import HookUtilModeTorch

__all__ = ["HookUtilModeTorch"]
