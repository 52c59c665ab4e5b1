"""The command `compare`: its options and what it calls."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_memory_saver._cli import output
from torch_memory_saver._cli.commands import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Compare"]

_DEFAULT_ROWS = 10
_MIN_MOMENTS = 3


class Compare(Command):
    """Compares memory snapshots: a table in the terminal, a page, or JSON."""

    name = "compare"
    help = "compare memory snapshots of several moments, and name what leaks (needs no PyTorch)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "snapshots",
            nargs="+",
            metavar="SNAPSHOT",
            help="files, or folders of moments, in the order of time; three moments or more tell a leak from a warm-up",
        )
        parser.add_argument("-o", "--output", metavar="FILE", help="also write a page with pictures (HTML in one file)")
        parser.add_argument(
            "--top", type=_positive, default=_DEFAULT_ROWS, metavar="N", help=f"rows of each kind (default {_DEFAULT_ROWS})"
        )
        parser.add_argument("--varying", action="store_true", help="also list call stacks whose memory rises and falls")
        parser.add_argument("--json", action="store_true", help="print an object with sizes in bytes instead of the table")
        parser.add_argument("--fail-on-leak", action="store_true", help="exit with status 1 if there is a leak")

    def run(self, arguments: argparse.Namespace) -> int:
        """Compare the snapshots.

        Raises:
            InvalidArgumentError: A file is no snapshot, or the page cannot be written.
        """
        import json

        from torch_memory_saver._files import write_text_file
        from torch_memory_saver.observe.memory import compare

        comparison = compare(*arguments.snapshots)
        if arguments.fail_on_leak and len(comparison.moments) < _MIN_MOMENTS:
            raise InvalidArgumentError(
                f"--fail-on-leak needs snapshots of three moments or more, because fewer cannot tell a leak from a "
                f"warm-up; these are of {len(comparison.moments)}.",
                operation="compare",
            )
        if arguments.output:
            with output.writing(self.name, arguments.output):
                write_text_file(comparison.html(), Path(arguments.output), "compare", "the page was")
        if arguments.json:
            print(json.dumps(comparison.as_dict(arguments.top), indent=2))
        else:
            text = comparison.table(output.width(), arguments.top, arguments.varying)
            output.write_line(text.removesuffix("\n"))
        return 1 if arguments.fail_on_leak and comparison.leaks else 0


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
