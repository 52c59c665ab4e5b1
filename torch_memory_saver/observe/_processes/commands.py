"""The commands `top` and `ask`: their options and what each calls."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torch_memory_saver._cli import output
from torch_memory_saver._cli.commands import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Ask", "Top"]

_MIN_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 2.0


class Top(Command):
    """Shows the GPUs and their processes, again and again."""

    name = "top"
    help = (
        "show the memory of each GPU by process, and managed memory by tag: resident, paused, backed up (needs no PyTorch)"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver.observe._processes.table import ORDERS

        orders = list(ORDERS)
        parser.add_argument("--once", action="store_true", help="print once and end")
        parser.add_argument("--json", action="store_true", help="print one JSON object per line, with sizes in bytes")
        parser.add_argument(
            "--interval",
            type=_interval,
            default=_DEFAULT_INTERVAL_S,
            metavar="SECONDS",
            help=f"seconds between refreshes (default {_DEFAULT_INTERVAL_S:g})",
        )
        parser.add_argument(
            "--sort",
            choices=orders,
            default=orders[0],
            metavar="ORDER",
            help=f"order of the processes: {', '.join(orders)} (default {orders[0]})",
        )
        parser.add_argument(
            "--filter", default="", metavar="TEXT", help="only processes whose number, name or a tag contains this"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver.observe._processes.top import run_top

        return run_top(arguments)


class Ask(Command):
    """Asks another process for a file, which it writes at its next pause or resume."""

    name = "ask"
    help = "ask another process to write a snapshot of its memory, or its latest events, at its next pause or resume"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("pid", type=_process, metavar="PID", help="the process, as `top` shows it")
        kind = parser.add_mutually_exclusive_group(required=True)
        kind.add_argument(
            "--snapshot",
            dest="kind",
            action="store_const",
            const="snapshot",
            help="its memory, allocation by allocation, for `compare` and PyTorch's memory_viz",
        )
        kind.add_argument("--events", dest="kind", action="store_const", const="events", help="its latest events")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="where to write it (default: beside the page of the process)"
        )
        parser.add_argument(
            "--timeout",
            type=_seconds,
            metavar="SECONDS",
            help="how long to wait for the next pause or resume (default: until the process ends)",
        )
        parser.add_argument(
            "--format",
            choices=("json", "chrome"),
            default="json",
            help="of events; json: for load_events() and timelines (default); chrome: a trace for Perfetto and "
            "chrome://tracing",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver.observe._processes.ask import Answer

        if arguments.format == "chrome" and arguments.kind != "events":
            raise InvalidArgumentError("--format chrome is a form of events: ask with --events", operation="ask")
        answer = Answer(arguments.pid, arguments.kind, arguments.output, arguments.format == "chrome")
        output.write_path(answer.wait(arguments.timeout))
        return 0


def _process(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return seconds


def _interval(text: str) -> float:
    seconds = _number(text)
    if not _MIN_INTERVAL_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {_MIN_INTERVAL_S}")
    return seconds
