"""The command `timeline`: event files as one page."""

from __future__ import annotations

import argparse

from torch_memory_saver._cli.command import Command
from torch_memory_saver._cli.output import write_line
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["TimelineCommand"]

_DEFAULT_OUTPUT = "timeline.html"


class TimelineCommand(Command):
    """Draws event files."""

    name = "timeline"
    help = "draw event files of several processes as one page: memory over time (needs no PyTorch and no GPU)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help="event files, or folders of TMS_EVENTS_DIR")
        parser.add_argument(
            "-o",
            "--output",
            default=_DEFAULT_OUTPUT,
            metavar="FILE",
            help=f"the page, HTML in one file (default {_DEFAULT_OUTPUT})",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Raises:
        InvalidArgumentError: A file is no event file, or the page cannot be written.
        """
        from torch_memory_saver.events.timeline import read_logs, write_timeline

        logs = read_logs(arguments.files)
        try:
            path = write_timeline(arguments.output, logs=logs)
        except OSError as error:
            raise InvalidArgumentError(f"timeline: {arguments.output}: {error.strerror}", operation="timeline") from error
        events = sum(len(log.events) for log in logs)
        write_line(f"{path}: {events} events of {len(logs)} process{'es' * (len(logs) != 1)}")
        return 0
