"""Guards the text of sizes, tables and wrapped lines, which messages, reports and commands share."""

from __future__ import annotations

import pytest

from torch_memory_saver import _text

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3 << 10, "3 KiB"),
        (512 * MIB, "512 MiB"),
        (-MIB, "-1 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert _text.binary_size(size) == text


def test_a_table_has_columns_of_one_width() -> None:
    rows = [("name", "kind", "MiB"), ("a", "long kind", "1.0"), ("longer", "", "1000.0")]
    assert _text.table(rows, left=2, indent="> ") == [
        "> name    kind          MiB",
        "> a       long kind     1.0",
        "> longer             1000.0",
    ]
    assert _text.table([("a", ""), ("bb", "")]) == ["a", "bb"], "a line does not end with spaces"


def test_lines_after_the_first_are_indented() -> None:
    assert _text.wrapped("one two three-four five", 12, indent="  ") == ["one two", "  three-four", "  five"]
    assert _text.wrapped("one two", 8, indent="  ", first="> ") == ["> one", "  two"]
    assert _text.wrapped("see /a/path/of/many/folders now", 8) == ["see", "/a/path/of/many/folders", "now"], (
        "paths stay whole"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [("größe 模", "größe 模"), ("a\x1b[31m\n", "a?[31m?"), ("\u202eevil", "?evil"), ("\udcff", "?"), ("\x9b2J", "?2J")],
)
def test_what_a_terminal_would_obey(text: str, shown: str) -> None:
    assert _text.printable(text) == shown


def test_the_message_of_an_error_of_the_system_has_no_number() -> None:
    assert _text.reason_of(OSError(21, "Is a directory", "a")) == "a: Is a directory"
    assert _text.reason_of(OSError(21, "Is a directory")) == "Is a directory"
    assert _text.reason_of(OSError("closed")) == "closed"
    assert _text.reason_of(ValueError("3 is odd")) == "3 is odd"


def test_numbers_of_things() -> None:
    assert [_text.counted(number, "block") for number in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
