"""Guards the progress bar: only on a terminal, and never on stdout."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from torch_memory_saver._cli.output import progress_bar

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeTqdm:
    """The used part of tqdm."""

    made: ClassVar[list[FakeTqdm]] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.total, self.n, self.closed = settings, None, 0, False
        FakeTqdm.made.append(self)

    def __enter__(self) -> FakeTqdm:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reset(self, total: int) -> None:
        self.total, self.n = total, 0

    def update(self, more: int) -> None:
        self.n += more


def test_nothing_is_shown_without_a_terminal() -> None:
    stream = io.StringIO()
    with progress_bar("pause", stream) as bar:
        assert bar is None
    assert stream.getvalue() == ""


def test_lines_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    with progress_bar("pause", stream) as bar:
        assert bar is not None
        for done in range(101):
            bar(done * MIB, 100 * MIB)
        bar(100 * MIB, 100 * MIB)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[3] == "pause: 30 MiB of 100 MiB"
    assert lines[-1] == "pause: 100 MiB of 100 MiB"
    assert capsys.readouterr() == ("", "")


def test_nothing_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    with progress_bar("pause", stream) as bar:
        assert bar is not None
        bar(0, 0)
    assert stream.getvalue() == "pause: 0 B of 0 B\n"


def test_the_bar_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTqdm.made.clear()
    module: Any = ModuleType("tqdm")
    module.tqdm = FakeTqdm
    monkeypatch.setitem(sys.modules, "tqdm", module)
    stream = Terminal()
    with progress_bar("pause", stream) as bar:
        (made,) = FakeTqdm.made
        assert bar is not None
        bar(10, 40)
        bar(30, 40)
        assert (made.total, made.n, made.closed) == (40, 30, False)
        bar(40, 40)
    assert (made.n, made.closed) == (40, True)
    assert made.settings["file"] is stream
    assert made.settings["leave"] is False


def test_the_real_bar_of_tqdm() -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    stream = Terminal()
    with progress_bar("pause", stream) as bar:
        assert bar is not None
        bar(10 * MIB, 40 * MIB)
        bar(40 * MIB, 40 * MIB)
    assert "pause" in stream.getvalue()
