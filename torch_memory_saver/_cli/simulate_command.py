"""The command `simulate`."""

from __future__ import annotations

import argparse

from torch_memory_saver import simulate
from torch_memory_saver._cli.command import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["SimulateCommand"]


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
