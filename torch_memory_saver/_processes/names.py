"""Names that other programs have chosen, made fit for terminals, logs and pages."""

from __future__ import annotations

__all__ = ["command_name", "printable"]


def printable(text: str) -> str:
    """The text with "?" for each character that a terminal would obey or cannot show."""
    return "".join(character if character.isprintable() else "?" for character in text)


def command_name(pid: int) -> str:
    """The short name of a process, as ps shows it; "" if it has ended or is not visible in this container."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return printable(file.read().strip())
    except OSError:
        return ""
