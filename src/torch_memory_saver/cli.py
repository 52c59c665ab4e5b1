"""The command line: one class a command. Nothing here needs torch or a GPU before a command that does is run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_memory_saver import __version__, _core, preload
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["Command", "DemoCommand", "InfoCommand", "main"]


class Command:
    """One command. `name` is what the user types, `help` one line about it."""

    name = ""
    help = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it and returns the exit status."""
        raise NotImplementedError


class DemoCommand(Command):
    """The cycle of reinforcement learning, checked."""

    name = "demo"
    help = "show a whole cycle of pause and resume, on the GPU or on the simulated one"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--device",
            choices=["auto", "gpu", "simulated"],
            default="auto",
            help="where to run: the GPU through PyTorch, the simulated GPU, or (auto) the GPU if there is one",
        )
        parser.add_argument("--ascii", action="store_true", help="draw without Unicode characters")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver.demo import run_demo

        return run_demo(arguments.device, ascii_only=arguments.ascii)


class InfoCommand(Command):
    """What is installed and what it finds."""

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
        except ImportError:
            return "not installed"
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
                free, total = _core.device_memory(device)
                rows.append((f"device {device}", f"{total / (1 << 30):.1f} GiB, {free / (1 << 30):.1f} GiB free"))
            except TorchMemorySaverError as error:
                rows.append((f"device {device}", str(error)))
        return rows


_COMMANDS: tuple[Command, ...] = (DemoCommand(), InfoCommand())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_memory_saver",
        description="Pause and resume the GPU memory of tensors without changing their addresses.",
    )
    parser.add_argument("--version", action="version", version=f"torch_memory_saver {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="command", required=True)
    for command in _COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except TorchMemorySaverError as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return status
