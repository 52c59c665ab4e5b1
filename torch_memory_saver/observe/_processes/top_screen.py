"""The screen of `top` in a terminal. Only this module uses curses. ``table`` makes what is shown."""

from __future__ import annotations

import contextlib
import curses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from torch_memory_saver._text import wrapped
from torch_memory_saver.observe._processes.names import cut, width_of
from torch_memory_saver.observe._processes.table import ORDERS, Line, lines_of

if TYPE_CHECKING:
    from torch_memory_saver.observe._processes.view import View

__all__ = ["can_show", "show"]

#: The intervals that + and - choose, in seconds.
_INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
#: A character, or the number that curses gives a key without one.
Key = str | int
_ENTER, _ESCAPE, _BACKSPACES = ("\n", "\r", curses.KEY_ENTER), "\x1b", ("\b", "\x7f", curses.KEY_BACKSPACE)
#: The milliseconds within which a key after Escape belongs to it. Terminals send arrow keys in this way.
_ESCAPE_DELAY_MS = 25
#: The interval at which the size of the terminal is queried.
_TICK_S = 0.25
_STYLES = {"gpu": curses.A_BOLD, "heading": curses.A_REVERSE, "tag": curses.A_DIM}
_HELP = "q quit  s sort  / filter  + - interval  arrows scroll  ? help"
#: The lines that the help key shows instead of the processes, until the next key: the subject, and the explanation.
_KEYS = (
    ("q", "quit"),
    ("s", f"sort the processes by the next of {', '.join(ORDERS)}"),
    ("/", "show only processes whose number, name or a tag contains the text that follows; Enter ends it, Esc clears it"),
    ("+ -", "look less often, or more often"),
    ("arrows", "scroll, as do Page Up, Page Down, Home and End"),
    ("?", "this help; any key ends it"),
    ("", ""),
    ("", "A GPU's lines say what is in use on it and who holds it. Below a process are its tags."),
    ("resident", "memory that is on the GPU"),
    ("paused", "memory that was released and keeps its addresses"),
    ("backup", "host memory, files and shared objects with the contents of what is paused"),
)
_KEY_WIDTH = 9
#: The first line and the last.
_FRAME_LINES = 2
_TERMINATED = 128


def can_show() -> bool:
    """Return whether the terminal can place the cursor."""
    try:
        curses.setupterm(os.environ.get("TERM") or "dumb", sys.stdout.fileno())
    except curses.error:  # unknown
        return False
    return bool(curses.tigetstr("cup"))


def show(look: Callable[[], View], interval: float, sort: str, pattern: str) -> int:
    """Show views until the user quits, and return the exit status. The terminal is as before after any end of it."""
    with _ended_by_signals():
        try:
            return curses.wrapper(lambda window: _Screen(window, look, interval, sort, pattern).run())
        except (_HungUp, curses.error) as error:
            if isinstance(error, _HungUp) or isinstance(error.__context__, _HungUp):  # there was nothing to restore
                return _TERMINATED + signal.SIGHUP
            raise


class _HungUp(Exception):
    """The terminal is gone. Its signal reaches only programs whose controlling terminal it is."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block by an exception, so that the terminal is restored. SIGWINCH only interrupts a
    wait: the size is queried instead, because curses misses a signal that comes while it does not wait, and because LINES
    and COLUMNS hide the new size from it. It needs a handler, because curses puts its own in the place of SIG_IGN."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _help_lines(width: int) -> list[Line]:
    lines: list[Line] = []
    for key, text in _KEYS:
        column = _KEY_WIDTH if key else 0
        lines += [Line(part, "") for part in wrapped(text, width, " " * column, f"{key:<{column}}") or [""]]
    return lines


class _Screen:
    """The state of the screen, which the keys change."""

    def __init__(self, window: curses.window, look: Callable[[], View], interval: float, sort: str, pattern: str) -> None:
        self._window = window
        self._look = look
        self._interval = interval
        self._sort = sort
        self._pattern = pattern
        self._typing = self._helping = False
        self._top = 0
        with contextlib.suppress(curses.error):  # a terminal that cannot hide the cursor
            curses.curs_set(0)
        curses.set_escdelay(_ESCAPE_DELAY_MS)

    def run(self) -> int:
        """Show a view when an interval ends, and at each key."""
        view, due = self._look(), time.monotonic() + self._interval
        while True:
            self._draw(view)
            key = self._key(due)
            if key is None or time.monotonic() >= due:
                view, due = self._look(), time.monotonic() + self._interval
            if key is not None and not self._obey(key):
                return 0

    def _key(self, due: float) -> Key | None:
        """Return the next key; None if there is none until then. A change of the terminal's size is one, within a tick."""
        while True:
            left = due - time.monotonic()
            self._window.timeout(max(int(min(left, _TICK_S) * 1000), 0))
            key = self._read()
            if key is None and self._adopt_size():
                return curses.KEY_RESIZE
            if key is not None or left <= 0:
                return key

    def _read(self) -> Key | None:
        try:
            return self._window.get_wch()
        except curses.error:  # none came in time
            return None

    def _adopt_size(self) -> bool:
        """Return whether the terminal has another size now.

        Raises:
            _HungUp: The terminal is gone.
        """
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError as error:
            raise _HungUp from error
        if not lines or not columns or (lines, columns) == self._window.getmaxyx():
            return False
        curses.resize_term(lines, columns)  # resizeterm would also put a key into the queue
        return True

    def _draw(self, view: View) -> None:
        height, width = self._window.getmaxyx()
        lines = _help_lines(width) if self._helping else lines_of(view, width, sort=self._sort, pattern=self._pattern)
        self._top = max(min(self._top, len(lines) - (height - _FRAME_LINES)), 0)
        title = f"torch_memory_saver top  {time.strftime('%H:%M:%S')}  every {self._interval:g} s  sorted by {self._sort}"
        shown = lines[self._top : self._top + max(height - _FRAME_LINES, 0)]
        self._window.erase()
        for y, line in enumerate([Line(title, "gpu"), *shown]):
            self._put(y, line, height, width)
        self._put(height - 1, Line(self._footer(), "heading"), height, width)
        self._window.refresh()

    def _footer(self) -> str:
        if self._typing:
            return f"filter: {self._pattern}_  (Enter: done, Esc: none)"
        return f"{_HELP}  filter: {self._pattern}" if self._pattern else _HELP

    def _put(self, y: int, line: Line, height: int, width: int) -> None:
        if y >= height:
            return
        # The last cell of the screen cannot be written, because the cursor would leave it.
        room = width - 1 if y == height - 1 else width
        text = cut(line.text, room)
        with contextlib.suppress(curses.error):  # a resize may be under way
            self._window.addstr(y, 0, text + " " * (room - width_of(text)), _STYLES.get(line.kind, curses.A_NORMAL))

    def _obey(self, key: Key) -> bool:
        """Obey a key, and return False to quit."""
        if key == curses.KEY_RESIZE:
            curses.update_lines_cols()
            self._window.clear()
        elif self._typing:
            self._type(key)
        elif self._helping or key == "?":
            self._helping = not self._helping
        elif key in ("q", "Q"):
            return False
        elif key == "s":
            orders = list(ORDERS)
            self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        elif key == "/":
            self._typing, self._pattern = True, ""
        elif key == "+":
            self._interval = min((step for step in _INTERVALS if step > self._interval), default=self._interval)
        elif key == "-":
            self._interval = max((step for step in _INTERVALS if step < self._interval), default=self._interval)
        else:
            self._scroll(key)
        return True

    def _type(self, key: Key) -> None:
        if key in _ENTER:
            self._typing = False
        elif key == _ESCAPE:
            self._typing, self._pattern = False, ""
        elif key in _BACKSPACES:
            self._pattern = self._pattern[:-1]
        elif isinstance(key, int):
            self._scroll(key)
        elif key.isprintable():
            self._pattern += key

    def _scroll(self, key: Key) -> None:
        page = max(self._window.getmaxyx()[0] - _FRAME_LINES, 1)
        steps: dict[Key, int] = {
            curses.KEY_UP: -1,
            curses.KEY_DOWN: 1,
            curses.KEY_PPAGE: -page,
            curses.KEY_NPAGE: page,
            curses.KEY_HOME: -self._top,
            curses.KEY_END: sys.maxsize,  # as far as there are lines
        }
        self._top = max(self._top + steps.get(key, 0), 0)
