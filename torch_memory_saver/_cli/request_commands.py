"""The commands `snapshot` and `events`: a file of another process, written at its next pause or resume."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from torch_memory_saver._cli.command import Command
from torch_memory_saver._cli.output import write_path

__all__ = ["EventsCommand", "SnapshotCommand"]

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
        from torch_memory_saver._diagnostics.processes.requests import request_file

        def tell() -> None:
            print(
                f"process {arguments.pid}: requested; served at its next pause or resume (Ctrl-C withdraws it)",
                file=sys.stderr,
                flush=True,
            )

        delivered = None
        while delivered is None:  # again where another command has moved the file
            written = request_file(arguments.pid, self.kind, arguments.timeout, on_wait=tell)
            delivered = self._deliver(written, arguments)
        write_path(delivered)
        return 0

    def _deliver(self, written: Path, arguments: argparse.Namespace) -> Path | None:
        """Puts the file where it is wanted, and returns its path; None if another command was faster."""
        if not self._moves(arguments):
            return written
        with _only_for_this_user():
            return self._move(written, arguments)

    def _move(self, written: Path, arguments: argparse.Namespace) -> Path | None:
        # The process writes one file for all requests. No other command moves it under this name.
        taken = written.with_name(f"{written.stem}.{os.getpid()}{written.suffix}")
        try:
            os.replace(written, taken)
        except FileNotFoundError:
            return None
        try:
            target = self._convert(taken, arguments)
        except BaseException:
            os.replace(taken, written)
            raise
        taken.unlink(missing_ok=True)
        return target

    def _moves(self, arguments: argparse.Namespace) -> bool:
        """Whether the file does not stay where the process writes it."""
        return arguments.output is not None

    def _convert(self, taken: Path, arguments: argparse.Namespace) -> Path:
        """Writes what is wanted from the file, and returns its path."""
        from torch_memory_saver._files import write_text_file

        output: Path = arguments.output
        write_text_file(taken.read_text(encoding="utf-8"), output, self.name, "the file was")
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

    def _moves(self, arguments: argparse.Namespace) -> bool:
        return super()._moves(arguments) or arguments.format == "chrome"

    def _convert(self, taken: Path, arguments: argparse.Namespace) -> Path:
        if arguments.format == "json":
            return super()._convert(taken, arguments)
        from torch_memory_saver.events import load_events, write_chrome_trace

        name = taken.name.partition(".")[0]
        target: Path = arguments.output or taken.with_name(f"{name}{_TRACE_SUFFIX}")
        write_chrome_trace(target, log=load_events(taken))
        return target


@contextlib.contextmanager
def _only_for_this_user() -> Iterator[None]:
    """Files that are made inside are readable by their user only."""
    before = os.umask(_UMASK)
    try:
        yield
    finally:
        os.umask(before)


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
