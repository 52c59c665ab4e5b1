"""The interface of a command, and the commands that need nothing but the saver: their names, options and calls.

The table in _additions.py lists all commands. The imports of a command are in the function that runs it, because the help
loads all classes.
"""

from __future__ import annotations

import abc
import argparse
import shutil

from torch_memory_saver import simulate
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Command", "Demo", "Run", "Simulate"]


class Command(abc.ABC):
    """One command. `name` is what the user types. `help` describes the command in one line."""

    name = ""
    help = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""
        return

    @abc.abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit status."""


class Demo(Command):
    """The command `demo`, which shows one step of reinforcement learning, and checks it."""

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


class Run(Command):
    """The command `run`, which runs a program that need not import this package, or prints the environment that it would
    get."""

    name = "run"
    help = "run a program that need not import torch_memory_saver, preloaded or recorded: run [options] -- command ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] -- command ..."
        parser.add_argument("--preload", action="store_true", help='preload the hook library (hook mode "preload")')
        parser.add_argument(
            "--manage",
            action="store_true",
            help="manage every allocation, also of a program that never imports torch_memory_saver; implies --preload",
        )
        parser.add_argument(
            "--record",
            type=_recordings,
            default=(),
            metavar="WHAT",
            help="record events, snapshots, history or oom, separated by commas, of each process (TMS_DEBUG)",
        )
        parser.add_argument(
            "--directory",
            metavar="DIR",
            help="where to record it (TMS_DEBUG_DIR; default: torch_memory_saver_debug in this folder)",
        )
        parser.add_argument(
            "--print-env",
            nargs="?",
            choices=("shell", "json", "torchrun"),
            const="shell",
            metavar="FORMAT",
            help="run nothing, and print the environment that the program would get: as shell (export lines, the default), "
            "json (Ray's runtime_env) or torchrun (what to write before torchrun)",
        )
        parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli import child_environment

        command = _program_of(arguments, self.name)
        if arguments.print_env is not None:
            if command:
                raise InvalidArgumentError("--print-env runs nothing: leave the command out", operation="run")
            child_environment.print_environment(arguments)
            return 0
        if not command:
            raise InvalidArgumentError("there is no command to run: use run [options] -- command ...", operation="run")
        return child_environment.run_program(command, arguments)


class Simulate(Command):
    """The command `simulate`, which runs a program on the simulated GPU."""

    name = "simulate"
    help = "run a program, also with PyTorch's CUDA build, on a simulated GPU: simulate [options] -- python script.py ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] -- command ..."
        parser.add_argument(
            "--devices",
            type=_devices,
            default=1,
            metavar="N",
            help=f"number of GPUs, 0 to {simulate.MAX_DEVICES} (default 1)",
        )
        parser.add_argument("--memory", type=_size, default="8GiB", metavar="SIZE", help="memory of each GPU (default 8GiB)")
        parser.add_argument(
            "--bandwidth",
            type=_size,
            metavar="SIZE",
            help="bytes per second of copies on a stream, such as 20GiB (default: as fast as the host)",
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
        command = _program_of(arguments, self.name)
        if not command:
            raise InvalidArgumentError("there is no command to run: use simulate [options] -- python script.py ...")
        simulate.check_imports(command)
        variables = simulate.environment(
            devices=arguments.devices,
            memory=arguments.memory,
            bandwidth=arguments.bandwidth,
            preload_hook=arguments.preload,
            report=arguments.report,
            trace=arguments.trace,
        )
        return simulate.run_command(command, variables)


def _program_of(arguments: argparse.Namespace, operation: str) -> list[str]:
    """Return the program and its arguments, without the `--` before them.

    Raises:
        InvalidArgumentError: The program is a Python script that the system cannot run.
    """
    command: list[str] = arguments.command
    command = command[1:] if command[:1] == ["--"] else command
    script = command[0] if command else ""
    if script.endswith(".py") and shutil.which(script) is None:
        raise InvalidArgumentError(
            f"{script} is no program but a Python script: write {operation} -- python {script}", operation=operation
        )
    return command


def _devices(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= simulate.MAX_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs from 0 to {simulate.MAX_DEVICES}")
    return number


def _size(text: str) -> int:
    try:
        return simulate.parse_bytes(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _recordings(text: str) -> list[str]:
    from torch_memory_saver._additions import added
    from torch_memory_saver._engine.background import requested_recordings

    known, unknown = requested_recordings(text)
    if unknown or not known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one or more of {', '.join(added('recording'))}")
    return known
