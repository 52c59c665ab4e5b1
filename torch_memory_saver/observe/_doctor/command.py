"""The command `doctor`: its options and what it calls."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli.commands import Command

__all__ = ["Doctor"]


class Doctor(Command):
    """The command `doctor`, which checks the machine."""

    name = "doctor"
    help = "check the installation, the GPUs and the machine, and say what to change"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
        parser.add_argument(
            "--ledger",
            action="store_true",
            help="show also who holds the memory of each GPU; with --json an object of `checks`, `ledger` and `failures`",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver.observe._doctor.doctor import run_doctor

        return run_doctor(as_json=arguments.json, with_ledger=arguments.ledger, debug=arguments.debug)
