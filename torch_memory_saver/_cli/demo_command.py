"""The command `demo`."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli.command import Command

__all__ = ["DemoCommand"]


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
