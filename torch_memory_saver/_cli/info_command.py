"""The command `info`."""

from __future__ import annotations

import argparse
import os
import sys

from torch_memory_saver import __version__, _core, torch_memory_saver
from torch_memory_saver._cli.command import Command
from torch_memory_saver._saver import preload
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["InfoCommand"]


class InfoCommand(Command):
    """Prints what is installed and which devices it finds."""

    name = "info"
    help = "print versions, library paths, the driver, devices and settings"

    def run(self, arguments: argparse.Namespace) -> int:
        rows = [
            ("torch_memory_saver", __version__),
            ("Python", f"{sys.version.split()[0]} ({sys.executable})"),
            ("PyTorch", self._torch()),
            ("hook mode", preload.mode_in_force()),
            ("library", _core.library_path),
            ("preload library", self._preload_library()),
            ("driver library", os.environ.get("TMS_CUDA_DRIVER") or "libcuda.so.1"),
            *self._devices(),
            ("host memory", f"after a resume: {torch_memory_saver.host_memory}"),
            *((name, value) for name, value in sorted(os.environ.items()) if name.startswith("TMS_")),
        ]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{name:<{width}}  {value}")
        return 0

    @staticmethod
    def _torch() -> str:
        try:
            import torch
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
            return "not installed" if missing else f"installed, but cannot be imported: {' '.join(str(error).split())}"
        cuda = torch.version.cuda
        return f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'built without CUDA'})"

    @staticmethod
    def _preload_library() -> str:
        path = preload.library_path()
        return str(path) if path.is_file() else f"{path} (missing)"

    @staticmethod
    def _devices() -> list[tuple[str, str]]:
        try:
            count = _core.device_count()
        except TorchMemorySaverError as error:
            return [("devices", f"none: {error}")]
        rows = [("devices", str(count))]
        for device in range(count):
            try:
                memory = _core.device_memory(device)
                free, total = memory.free / (1 << 30), memory.total / (1 << 30)
                rows.append((f"device {device}", f"{total:.1f} GiB, {free:.1f} GiB free"))
            except TorchMemorySaverError as error:
                rows.append((f"device {device}", str(error)))
        return rows
