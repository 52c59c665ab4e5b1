"""The commands `snapshot` and `events`: a file of another process, written at its next pause or resume."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from torch_memory_saver._cli.command import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["EventsCommand", "SnapshotCommand"]

#: Files are readable by their user only.
_UMASK = 0o077
_TRACE_SUFFIX = ".trace.json"


class _RequestCommand(Command):
    """Requests a file of a process."""

    kind = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("pid", type=_process, metavar="PID", help="the process, as `top` shows it")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="where to write it (default: beside the page of the process)"
        )
        parser.add_argument(
            "--timeout",
            type=_seconds,
            metavar="SECONDS",
            help="how long to wait for the next pause or resume (default: until the process ends)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._processes.requests import request_file

        def tell() -> None:
            print(
                f"process {arguments.pid}: requested; served at its next pause or resume (Ctrl-C withdraws it)",
                file=sys.stderr,
                flush=True,
            )

        written = request_file(arguments.pid, self.kind, arguments.timeout, on_wait=tell)
        os.umask(_UMASK)
        try:
            print(self._deliver(written, arguments))
        except OSError as error:
            raise InvalidArgumentError(str(error)) from error
        return 0

    def _deliver(self, written: Path, arguments: argparse.Namespace) -> Path:
        """Puts the file where it is wanted, and returns its path."""
        if arguments.output is None:
            return written
        from torch_memory_saver.memory.files import write_text_file

        output: Path = arguments.output
        write_text_file(written.read_text(encoding="utf-8"), output, self.name, "the file was")
        written.unlink(missing_ok=True)
        return output


class SnapshotCommand(_RequestCommand):
    """The managed memory of another process, allocation by allocation."""

    name = "snapshot"
    help = "write what another process manages, allocation by allocation, as JSON, at its next pause or resume"
    kind = "snapshot"


class EventsCommand(_RequestCommand):
    """The latest events of another process."""

    name = "events"
    help = "write the latest events of another process, at its next pause or resume"
    kind = "events"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--format",
            choices=("json", "chrome"),
            default="json",
            help="json: for load_events() and timelines (default); chrome: a trace for Perfetto and chrome://tracing",
        )

    def _deliver(self, written: Path, arguments: argparse.Namespace) -> Path:
        if arguments.format == "json":
            return super()._deliver(written, arguments)
        from torch_memory_saver.events import load_events, write_chrome_trace

        name = written.name.partition(".")[0]
        target: Path = arguments.output or written.with_name(f"{name}{_TRACE_SUFFIX}")
        write_chrome_trace(target, log=load_events(written))
        written.unlink(missing_ok=True)
        return target


def _process(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
