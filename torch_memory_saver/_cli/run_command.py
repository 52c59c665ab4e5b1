"""The command `run`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch_memory_saver._cli.command import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["RunCommand"]


class RunCommand(Command):
    """Runs a program that need not import this package."""

    name = "run"
    help = "run a program that need not import torch_memory_saver, preloaded or recorded: run [options] -- command ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver._cli import child_environment

        parser.usage = "%(prog)s [options] -- command ..."
        child_environment.add_arguments(parser)
        parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli import child_environment
        from torch_memory_saver._replace import replace_process

        command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
        if not command:
            raise InvalidArgumentError("there is no command to run: use run [options] -- command ...", operation="run")
        options = child_environment.options_of(arguments)
        variables = child_environment.variables_for(options, os.environ, "run")
        if options.events is not None:
            self._make(options.events)
        return replace_process(command, os.environ | variables, "run")

    @staticmethod
    def _make(folder: str) -> None:
        """So that a folder that cannot be written to is an error now, and not a warning of each process."""
        from torch_memory_saver._cli.host_checks import why_not_writable

        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            problem = why_not_writable(Path(folder))
        except OSError as error:
            problem = error.strerror
        if problem is not None:
            raise InvalidArgumentError(
                f"run: event files cannot be written to {folder}: {problem}: choose another folder.", operation="run"
            )
