"""The command `store`: its options and its output."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_memory_saver._cli.commands import Command
from torch_memory_saver._cli.output import write_line
from torch_memory_saver._text import binary_size, counted, printable, reason_of, table
from torch_memory_saver.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch_memory_saver.observe._store.cleaning import Removed
    from torch_memory_saver.observe._store.contents import Contents

__all__ = ["Store", "lines_of", "sentence_of"]


class Store(Command):
    """The command `store`, which lists and cleans the shared store."""

    name = "store"
    help = (
        'list published weights and host copies that processes share (backup="shared"), '
        "and remove what dead processes have left"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dir",
            metavar="PATH",
            help="the folder (default: TMS_SHARED_DIR, or /dev/shm/torch_memory_saver-store-<uid>)",
        )
        parser.add_argument(
            "--remove",
            metavar="NAME",
            nargs="+",
            action="extend",
            type=_published_name,
            default=[],
            help="remove published weights (torch_memory_saver.node_store) before the listing",
        )
        parser.add_argument("--clean", action="store_true", help="remove what dead processes have left before the listing")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the contents of the folder. The status is 1 if something could not be removed, or if no process can use
        the store.

        Raises:
            InvalidArgumentError: `--dir` names no folder, or no store.
            OSError: The folder is refused or cannot be read.
        """
        from torch_memory_saver._shared_folder import OBJECTS, VARIABLE, opened_store, store_path
        from torch_memory_saver.observe._store.cleaning import clean_store
        from torch_memory_saver.observe._store.contents import read_store

        failures: list[str] = []
        path = store_path(arguments.dir)
        try:
            with opened_store(path) as folder:
                if arguments.dir and not (folder.path / OBJECTS).is_dir():
                    raise InvalidArgumentError(
                        f"{printable(str(folder.path))} is no shared store: it has no folder '{OBJECTS}'",
                        operation="store",
                    )
            failures += _remove(path, arguments.remove)
            if arguments.clean:
                removed = clean_store(path)
                failures += removed.failures
                write_line(sentence_of(removed))
            contents = read_store(path)
            write_line("\n".join(lines_of(contents)))
            if contents.problem:
                failures.append(f"no process can use this store: {contents.problem}")
        except NotADirectoryError as error:
            raise InvalidArgumentError(
                f"{printable(str(path))} is no folder: name the folder of a shared store, by --dir or {VARIABLE}",
                operation="store",
            ) from error
        except FileNotFoundError as error:
            missing = printable(str(error.filename or path))
            if arguments.dir:
                raise InvalidArgumentError(f"there is no folder {missing}", operation="store") from error
            write_line(f"{missing} does not exist: no process of this user has used the shared store here")
            failures += [_not_published(name) for name in arguments.remove]
        for failure in failures:
            write_line(f"{arguments.parser.prog}: error: {failure}", sys.stderr)
        return 1 if failures else 0


def _published_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; without options, `store` lists the published names")
    return text


def _not_published(name: str) -> str:
    return f"nothing is published as {name!r}"


def _remove(path: Path, names: Sequence[str]) -> Iterator[str]:
    """Remove published names. Yield a sentence about each one that could not be removed."""
    from torch_memory_saver._published import remove_published

    for name in names:
        try:
            if remove_published(path, name):
                write_line(f"removed the published weights {name!r}")
            else:
                yield _not_published(name)
        except (InvalidArgumentError, OSError) as error:
            yield f"{name!r} was not removed: {reason_of(error)}"


def sentence_of(removed: Removed) -> str:
    """Return what a clean-up has removed."""
    parts = [
        _dead(removed.holders),
        counted(removed.unfinished, "unfinished object"),
        counted(removed.objects, "object"),
    ]
    return f"removed {parts[0]}, {parts[1]} and {parts[2]}: {binary_size(removed.bytes)}"


def lines_of(contents: Contents) -> list[str]:
    """Return the lines of the listing: the total, the objects, the published names, and what is not as it should be."""
    objects, users = counted(len(contents.objects), "object"), contents.holders
    used = f"{users} process uses" if users == 1 else f"{users} processes use"
    lines = [f"{printable(str(contents.path))}: {binary_size(contents.bytes)} in {objects}; {used} the store"]
    if contents.objects:
        rows = [(each.name, binary_size(each.bytes), str(each.holders)) for each in contents.objects]
        lines += ["", *table([("OBJECT", "SIZE", "HOLDERS"), *rows])]
    if contents.names:
        names = [
            (_shown(each.name), binary_size(each.bytes), str(each.objects), _minute(each.published))
            for each in contents.names
        ]
        shown = table([("PUBLISHED NAME", "SIZE", "OBJECTS", "PUBLISHED".ljust(16)), *names])
        width = max(map(len, shown))
        # The last words of an identity, such as the rank, often are what tells two names apart, so it is shown whole.
        identities = ["IDENTITY", *(_shown(each.identity) for each in contents.names)]
        lines += ["", *(f"{row.ljust(width)}  {identity}".rstrip() for row, identity in zip(shown, identities, strict=True))]
    remarks = list(_remarks(contents))
    return [*lines, "", *remarks] if remarks else lines


def _remarks(contents: Contents) -> Iterator[str]:
    for each in contents.names:
        if each.damage:
            advice = "Publish it again, as adopt_or_load() does, or remove it with --remove"
            yield f"{_shown(each.name)} cannot be adopted: {each.damage}. {advice}"
    if contents.unfinished:
        yield f"{counted(contents.unfinished, 'unfinished object')}: {binary_size(contents.unfinished_bytes)}"
    lost = sum(not each.listed for each in contents.objects)
    if lost:
        found = f"{counted(lost, 'object')} can be found by no other process"
        yield f"{found}, and will be released with the last holder or name"
    if contents.dead:
        them = "it" if contents.dead == 1 else "them"
        yield f"{_dead(contents.dead)}: the next pause of any process removes {them}, or --clean"


def _dead(holders: int) -> str:
    return "1 holder of a dead process" if holders == 1 else f"{holders} holders of dead processes"


def _minute(seconds: float) -> str:
    """Return a local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _shown(name: str) -> str:
    """Return a name, or its text in Python if a terminal would obey or cannot show it."""
    return name if name.isprintable() else repr(name)
