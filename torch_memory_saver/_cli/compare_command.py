"""The command `compare`."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli.command import Command

__all__ = ["CompareCommand"]


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
