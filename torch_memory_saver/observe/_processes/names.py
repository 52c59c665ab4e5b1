"""Names that other programs have chosen, made fit for terminals, logs and pages."""

from __future__ import annotations

import functools
import os
import pwd
import unicodedata

from torch_memory_saver._text import printable

__all__ = ["command_name", "cut", "user_of", "width_of"]

#: Unicode categories of characters that are drawn over the one before them.
_WITHOUT_WIDTH = ("Mn", "Me")


def command_name(pid: int) -> str:
    """Return the short name of a process, as ps shows it; "" if it has ended or is not visible in this container."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return printable(file.read().strip())
    except OSError:
        return ""


def user_of(pid: int) -> str:
    """Return the name of the user whose process this is, or the number of a user without a name; "" if that is unknown."""
    try:
        return _name_of_user(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


@functools.cache
def _name_of_user(uid: int) -> str:
    """Return the name of a user. It is cached, because the system may ask a server for it."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def width_of(text: str) -> int:
    """Return the number of columns of a terminal that the text takes. Chinese characters, for instance, take two each."""
    return sum(map(_columns, text))


def cut(text: str, width: int) -> str:
    """Return the longest begin of the text that takes at most `width` columns."""
    taken = 0
    for number, character in enumerate(text):
        taken += _columns(character)
        if taken > width:
            return text[:number]
    return text


def _columns(character: str) -> int:
    if unicodedata.category(character) in _WITHOUT_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
