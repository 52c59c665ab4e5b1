"""The command line, with one class for each command. PyTorch is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_memory_saver import __version__, _core, simulate, torch_memory_saver
from torch_memory_saver._cli.command import Command
from torch_memory_saver._cli.request_commands import EventsCommand, SnapshotCommand
from torch_memory_saver._cli.top_command import TopCommand
from torch_memory_saver._saver import preload
from torch_memory_saver.errors import InvalidArgumentError, TorchMemorySaverError

#: The exit status after Ctrl-C, as in shells.
_INTERRUPTED = 130

__all__ = [
    "BenchCommand",
    "Command",
    "CompareCommand",
    "DemoCommand",
    "DoctorCommand",
    "InfoCommand",
    "SimulateCommand",
    "main",
]


class DemoCommand(Command):
    """Shows one step of reinforcement learning, and checks it."""

    name = "demo"
    help = "show a whole cycle of pause and resume, on the GPU or on the simulated GPU"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--device",
            choices=["auto", "gpu", "simulated"],
            default="auto",
            help="where to run: the GPU through PyTorch, the simulated GPU, or (auto) the GPU if there is one",
        )
        parser.add_argument("--ascii", action="store_true", help="draw without Unicode characters")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.demo import run_demo

        return run_demo(arguments.device, ascii_only=arguments.ascii)


class BenchCommand(Command):
    """Runs the benchmarks."""

    name = "bench"
    help = "compare pause and resume with the limits of the hardware, on the GPU or (small sizes) on the simulated GPU"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver._bench import command

        command.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._bench import command

        return command.run(command.from_arguments(arguments))


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


class DoctorCommand(Command):
    """Checks the machine."""

    name = "doctor"
    help = "check what sending tensors to other processes needs of this machine, and say what to change"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.doctor import run_doctor

        return run_doctor(as_json=arguments.json)


class CompareCommand(Command):
    """Compares memory snapshots."""

    name = "compare"
    help = "compare memory snapshots of several moments, and name what leaks (needs no PyTorch)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver._cli import compare

        compare.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli import compare

        return compare.run(arguments)


class SimulateCommand(Command):
    """Runs a program on the simulated GPU."""

    name = "simulate"
    help = "run a program, also with PyTorch's CUDA build, on a simulated GPU: simulate [options] -- python script.py ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] -- command ..."
        parser.add_argument(
            "--devices",
            type=int,
            choices=range(simulate.MAX_DEVICES + 1),
            default=1,
            metavar="N",
            help=f"number of GPUs, 0 to {simulate.MAX_DEVICES} (default 1)",
        )
        parser.add_argument(
            "--memory", type=self._size, default="8GiB", metavar="SIZE", help="memory of each GPU (default 8GiB)"
        )
        parser.add_argument(
            "--bandwidth",
            type=self._size,
            metavar="SIZE",
            help="bytes per second of copies on a stream, such as 20GiB (default: as fast as the host)",
        )
        parser.add_argument(
            "--kernels",
            choices=simulate.KERNELS,
            default=simulate.KERNELS[0],
            help="how operators are executed: by PyTorch's CPU implementations (cpu, the default); or simple kernels are "
            "interpreted, and other kernels fail (error) or do nothing (skip)",
        )
        parser.add_argument("--preload", action="store_true", help='also preload the hook library (hook mode "preload")')
        parser.add_argument(
            "--report", action="store_true", help="print at the end of each process what it still holds on the GPU"
        )
        parser.add_argument(
            "--trace", metavar="FILE", help="append every call of the driver, the runtime and NCCL to this file"
        )
        parser.add_argument(
            "command", nargs=argparse.REMAINDER, help='the program and its arguments; "python" is this interpreter'
        )

    def run(self, arguments: argparse.Namespace) -> int:
        command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
        if not command:
            raise InvalidArgumentError("there is no command to run: use simulate [options] -- python script.py ...")
        simulate.check_imports(command)
        variables = simulate.environment(
            devices=arguments.devices,
            memory=arguments.memory,
            bandwidth=arguments.bandwidth,
            kernels=arguments.kernels,
            preload_hook=arguments.preload,
            report=arguments.report,
            trace=arguments.trace,
        )
        return simulate.run_command(command, variables)

    @staticmethod
    def _size(text: str) -> int:
        try:
            return simulate.parse_bytes(text)
        except InvalidArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from error


_COMMANDS: tuple[Command, ...] = (
    DemoCommand(),
    BenchCommand(),
    InfoCommand(),
    DoctorCommand(),
    CompareCommand(),
    TopCommand(),
    SnapshotCommand(),
    EventsCommand(),
    SimulateCommand(),
)


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
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status
