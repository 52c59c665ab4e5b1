"""The command `top`: what is on the GPUs, and what of it is managed."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

from torch_memory_saver._cli.command import Command
from torch_memory_saver._cli.output import write_line

if TYPE_CHECKING:
    from torch_memory_saver._diagnostics.processes.view import View

__all__ = ["SORT_KEYS", "TopCommand", "look"]

#: What processes can be sorted by: the keys of ``_processes.table.ORDERS``, the default first.
SORT_KEYS = ("memory", "paused", "pid", "name", "failures")
_SHORTEST_S, _DEFAULT_S = 0.1, 2.0
_TICK_S = 0.25
#: The width of a table that goes to a file or a pipe.
_WIDTH_WITHOUT_TERMINAL = 100


class TopCommand(Command):
    """Shows the GPUs and their processes, again and again."""

    name = "top"
    help = (
        "show the memory of each GPU by process, and managed memory by tag: resident, paused, backed up (needs no PyTorch)"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="print once and end")
        parser.add_argument("--json", action="store_true", help="print a JSON object a line, with sizes in bytes")
        parser.add_argument(
            "--interval",
            type=_interval,
            default=_DEFAULT_S,
            metavar="SECONDS",
            help=f"time between two looks (default {_DEFAULT_S:g})",
        )
        parser.add_argument(
            "--sort", choices=SORT_KEYS, default=SORT_KEYS[0], help=f"order of the processes (default {SORT_KEYS[0]})"
        )
        parser.add_argument(
            "--filter", default="", metavar="TEXT", help="only processes whose number, name or a tag contains this"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        if not (arguments.once or arguments.json) and _is_terminal(sys.stdin) and _is_terminal(sys.stdout):
            from torch_memory_saver._cli.top_screen import can_show, show

            if can_show():
                return show(look, arguments.interval, arguments.sort, arguments.filter)
        return _print(arguments)


def _is_terminal(stream: TextIO | None) -> bool:
    """None: the program was started with the stream closed."""
    return stream is not None and stream.isatty()


def _print(arguments: argparse.Namespace) -> int:
    from torch_memory_saver._diagnostics.processes.table import lines_of
    from torch_memory_saver._diagnostics.processes.view import as_json

    while True:
        view = look()
        if arguments.json:
            text = json.dumps(as_json(view))
        else:
            width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
            lines = lines_of(view, width, sort=arguments.sort, pattern=arguments.filter)
            text = "\n".join(line.text for line in lines)
        write_line(text)
        if arguments.once:
            return 0
        _sleep(arguments.interval)
        if not arguments.json:
            print()


def _sleep(seconds: float) -> None:
    """In ticks: Ctrl-C that comes just before a sleep begins does not shorten it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _TICK_S))


def look() -> View:
    """What processes hold now."""
    from torch_memory_saver._diagnostics.processes.names import command_name, user_of
    from torch_memory_saver._diagnostics.processes.pages import read_pages
    from torch_memory_saver._diagnostics.processes.view import Program, make_view
    from torch_memory_saver._nvml import read_gpus

    pages, gpus = read_pages(), read_gpus()
    pids = {page.pid for page in pages.pages if not page.foreign}
    pids |= {process.pid for gpu in gpus.gpus for process in gpu.processes}
    programs = {pid: Program(command_name(pid), user_of(pid)) for pid in pids}
    return make_view(pages, gpus, time.monotonic_ns(), programs)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _SHORTEST_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {_SHORTEST_S}")
    return seconds
