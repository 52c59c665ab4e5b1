"""What a command is."""

from __future__ import annotations

import abc
import argparse

__all__ = ["Command"]


class Command(abc.ABC):
    """One command. `name` is what the user types. `help` describes the command in one line."""

    name = ""
    help = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's options."""
        return

    @abc.abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command and returns the exit status."""
