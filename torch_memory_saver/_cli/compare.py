"""The command `compare`: a table in the terminal, a page, or JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.memory import compare

__all__ = ["add_arguments", "run"]

_DEFAULT_TOP = 10
#: The width of a table that goes to a file or a pipe.
_WIDTH_WITHOUT_TERMINAL = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "snapshots",
        nargs="+",
        metavar="SNAPSHOT",
        help="files, or folders of moments, in the order of time; three moments or more tell a leak from a warm-up",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also write a page with pictures (HTML in one file)")
    parser.add_argument(
        "--top", type=_positive, default=_DEFAULT_TOP, metavar="N", help=f"rows of each kind (default {_DEFAULT_TOP})"
    )
    parser.add_argument("--varying", action="store_true", help="also list call stacks whose memory rises and falls")
    parser.add_argument("--json", action="store_true", help="print an object with sizes in bytes instead of the table")
    parser.add_argument("--fail-on-leak", action="store_true", help="exit with status 1 if there is a leak")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit status.

    Raises:
        InvalidArgumentError: A file is no snapshot, or the page cannot be written.
    """
    comparison = compare(*arguments.snapshots)
    if arguments.output:
        _write(arguments.output, comparison.html())
    if arguments.json:
        print(json.dumps(comparison.as_dict(arguments.top), indent=2))
    else:
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
        text = comparison.table(width, arguments.top, arguments.varying)
        # Names of files and functions may have characters that the terminal's encoding lacks.
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="")
    return 1 if arguments.fail_on_leak and comparison.leaks else 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidArgumentError(
            f"compare: {path} cannot be written: {error.strerror}: choose another file.", operation="compare"
        ) from error


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
