"""Old import paths of the saver's classes: see compat.py."""

from torch_memory_saver.compat import BinaryWrapper
from torch_memory_saver.implementation import Implementation as _TorchMemorySaverImpl
from torch_memory_saver.saver import TorchMemorySaver

__all__ = ["BinaryWrapper", "TorchMemorySaver", "_TorchMemorySaverImpl"]
