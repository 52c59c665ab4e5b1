"""The command `store`: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_memory_saver._cli.commands import Command
from torch_memory_saver._cli.output import write_line
from torch_memory_saver._text import binary_size, counted, printable, table
from torch_memory_saver.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch_memory_saver.observe._store.cleaning import Removed
    from torch_memory_saver.observe._store.contents import Contents

__all__ = ["Store", "lines_of", "sentence_of"]


class Store(Command):
    """Lists the shared store, and cleans it."""

    name = "store"
    help = 'list the host copies that processes share (backup="shared"), and remove what dead processes have left'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dir",
            metavar="PATH",
            help="the folder (default: TMS_SHARED_DIR, or /dev/shm/torch_memory_saver-store-<uid>)",
        )
        parser.add_argument(
            "--remove", metavar="NAME", help="first remove published weights (torch_memory_saver.node_store)"
        )
        parser.add_argument("--clean", action="store_true", help="first remove what dead processes have left")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the contents of the folder. The status is 1 if something could not be removed.

        Raises:
            InvalidArgumentError: `--dir` names no folder, or `--remove` no published weights.
            OSError: The folder is refused or cannot be read.
        """
        from torch_memory_saver._published import remove_published
        from torch_memory_saver._shared_folder import store_path
        from torch_memory_saver.observe._store.cleaning import clean_store
        from torch_memory_saver.observe._store.contents import read_store

        failures: list[str] = []
        path = store_path(arguments.dir)
        try:
            if arguments.remove is not None:
                if not remove_published(path, arguments.remove):
                    raise InvalidArgumentError(
                        f"store: nothing is published as '{printable(arguments.remove)}'", operation="store"
                    )
                write_line(f"removed the published weights '{printable(arguments.remove)}'")
            if arguments.clean:
                removed = clean_store(path)
                failures = removed.failures
                write_line(sentence_of(removed))
            write_line("\n".join(lines_of(read_store(path))))
        except FileNotFoundError as error:
            missing = printable(str(error.filename or path))
            if arguments.dir:
                raise InvalidArgumentError(f"store: there is no folder {missing}", operation="store") from error
            write_line(f"{missing} does not exist: no process of this user has used the shared store here")
        for failure in failures:
            write_line(failure, sys.stderr)
        return 1 if failures else 0


def sentence_of(removed: Removed) -> str:
    """Return what a clean-up has removed."""
    parts = [
        counted(removed.holders, "holder"),
        counted(removed.unfinished, "unfinished object"),
        counted(removed.objects, "object"),
    ]
    return f"removed {parts[0]} of dead processes, {parts[1]} and {parts[2]}: {binary_size(removed.bytes)}"


def lines_of(contents: Contents) -> list[str]:
    """Return the lines of the listing: the total, the objects, the published names, and what is not as it should be."""
    objects, users = counted(len(contents.objects), "object"), contents.holders
    used = f"{users} process uses" if users == 1 else f"{users} processes use"
    lines = [f"{printable(str(contents.path))}: {binary_size(contents.bytes)} in {objects}; {used} the store"]
    if contents.objects:
        rows = [(each.name, binary_size(each.bytes), str(each.holders)) for each in contents.objects]
        lines += ["", *table([("OBJECT", "SIZE", "HOLDERS"), *rows])]
    if contents.names:
        names = [(printable(each.name), binary_size(each.bytes), str(each.objects)) for each in contents.names]
        lines += ["", *table([("PUBLISHED NAME", "SIZE", "OBJECTS"), *names])]
    remarks = list(_remarks(contents))
    return [*lines, "", *remarks] if remarks else lines


def _remarks(contents: Contents) -> Iterator[str]:
    if contents.unfinished:
        yield f"{counted(contents.unfinished, 'unfinished object')}: {binary_size(contents.unfinished_bytes)}"
    lost = sum(not each.listed for each in contents.objects)
    if lost:
        yield f"{counted(lost, 'object')} can be found by no other process, and will be released with the last holder"
    if contents.dead:
        yield f"{counted(contents.dead, 'holder')} of dead processes: the next pause of any process removes them, or --clean"
