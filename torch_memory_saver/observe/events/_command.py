"""The command `timeline`: its options and what it calls."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli import output
from torch_memory_saver._cli.commands import Command

__all__ = ["Timeline"]

_DEFAULT_PAGE = "timeline.html"


class Timeline(Command):
    """Draws event files as one page."""

    name = "timeline"
    help = "draw event files of several processes as one page: memory over time (needs no PyTorch and no GPU)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help="event files, or folders of `run --directory`")
        parser.add_argument(
            "-o",
            "--output",
            default=_DEFAULT_PAGE,
            metavar="FILE",
            help=f"the page, HTML in one file (default {_DEFAULT_PAGE})",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the page.

        Raises:
            InvalidArgumentError: A file is no event file, or the page cannot be written.
        """
        from torch_memory_saver.observe.events.timeline import read_logs, write_timeline

        logs = read_logs(arguments.files)
        with output.writing(self.name, arguments.output):
            path = write_timeline(arguments.output, logs=logs)
        events = sum(len(log.events) for log in logs)
        output.write_line(f"{path}: {events} events of {len(logs)} process{'es' * (len(logs) != 1)}")
        return 0
