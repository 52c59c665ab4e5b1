"""Text of messages, reports and commands: sizes, tables, wrapped lines, names of others, and warnings that are logged once.

Warnings that are logged once are about mistakes that change nothing else: the call goes on, and no exception shows them. Any
thread may call. There is no lock. A forked child does not repeat what its parent has logged.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Sequence

__all__ = [
    "binary_size",
    "counted",
    "described",
    "duration",
    "forget_warnings",
    "joined",
    "mebibytes",
    "printable",
    "reason_of",
    "signed_mebibytes",
    "suggestion",
    "table",
    "warn_once",
    "with_points",
    "with_sentence",
    "wrapped",
]

logger = logging.getLogger("torch_memory_saver")

_MIB = 1 << 20
_STEP = 1024
#: Sizes below this many MiB are shown with more digits.
_SMALL = 0.1
_UNKNOWN = "-"
_WIDTH = 80
#: Causes that contain names of the program, such as tags, must not grow without end.
_MAX_CAUSES = 1000

_logged: dict[str, object] = {}


def mebibytes(size: float | None) -> str:
    """Return a size as a number of MiB, with as many digits as a small one needs; "-" for one that is not known."""
    if size is None:
        return _UNKNOWN
    number = size / _MIB
    return f"{number:.1f}" if number == 0 or abs(number) >= _SMALL else f"{number:.4f}"


def signed_mebibytes(size: float) -> str:
    """Return a change in MiB, with its sign."""
    return ("+" if size > 0 else "") + mebibytes(size)


def binary_size(size: float) -> str:
    """Return a size in the unit that suits it, such as "1.5 GiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= _STEP and len(units) > 1:
        size /= _STEP
        del units[0]
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


def with_sentence(message: str, sentence: str) -> str:
    """Return an error's message with a sentence after its first line. An empty sentence adds nothing."""
    first, line_break, points = message.partition("\n")
    return f"{first} {sentence}{line_break}{points}" if sentence else message


def with_points(message: str, *points: str) -> str:
    """Return an error's message with further points, a line each. A point that is "" is left out."""
    return "\n- ".join([message, *filter(None, points)])


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as "1 block" or "2 blocks". `noun`: regular, in the singular."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it, such as "7.8 ms" or "1.25 s"."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def joined(names: Iterable[str]) -> str:
    """Return names as a part of a sentence, such as "a, b and c"."""
    *others, last = map(printable, names)
    return f"{', '.join(others)} and {last}" if others else last


def printable(text: str) -> str:
    """Return the text with "?" for each character that a terminal would obey or cannot show, such as a line break."""
    return "".join(character if character.isprintable() else "?" for character in text)


def table(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "") -> list[str]:
    """Return a line for each row, with columns of the same width.

    Args:
        rows: The cells. Every row has the same number.
        left: The number of columns, from the first on, that are aligned to the left. The others are numbers.
        indent: The beginning of each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def wrapped(text: str, width: int = _WIDTH, indent: str = "", first: str = "") -> list[str]:
    """Return a text in lines of at most `width` characters. A longer word has a line of its own.

    Args:
        text: The text. Its line breaks count as spaces.
        width: The most characters in a line.
        indent: The beginning of each line after the first one.
        first: The beginning of the first line.
    """
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def described(value: object) -> str:
    """Return a plain value, or the type of another object, whose text may have many lines."""
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return repr(value) if is_plain else f"a {type(value).__name__}"


def reason_of(error: Exception) -> str:
    """Return the message of an error: for an OSError the file and the text of the system, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known name most similar to `name`; "" if there is none."""
    import difflib

    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def warn_once(cause: str, message: str, *arguments: object) -> None:
    """Log a warning, unless one of the same cause was logged before.

    Args:
        cause: The name of the cause. It is not shown.
        message: The text, in the format of :mod:`logging`.
        arguments: The values of the text.
    """
    if len(_logged) >= _MAX_CAUSES:
        return
    mine = object()
    if _logged.setdefault(cause, mine) is mine:
        logger.warning(message + " (Logged once.)", *arguments)


def forget_warnings() -> None:
    """Let every cause be logged again. For tests."""
    _logged.clear()
