"""The command `bench`."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli.command import Command

__all__ = ["BenchCommand"]


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
