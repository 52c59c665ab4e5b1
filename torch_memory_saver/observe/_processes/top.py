"""The command `top`, which shows the memory of the GPUs, and how much of it is managed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from torch_memory_saver import _startup
from torch_memory_saver._cli.output import width, write_line
from torch_memory_saver._text import printable

if TYPE_CHECKING:
    from torch_memory_saver.observe._processes.view import StoreView, View

__all__ = ["look", "run_top"]

_TICK_S = 0.25


def run_top(arguments: argparse.Namespace) -> int:
    """Show the screen on a terminal, and print otherwise. Return the exit status."""
    if not (arguments.once or arguments.json) and _is_terminal(sys.stdin) and _is_terminal(sys.stdout):
        from torch_memory_saver.observe._processes.top_screen import can_show, show

        if can_show():
            return show(look, arguments.interval, arguments.sort, arguments.filter)
    return _print(arguments)


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. It is None if the program was started with the stream closed."""
    return stream is not None and stream.isatty()


def _print(arguments: argparse.Namespace) -> int:
    from torch_memory_saver.observe._processes.table import lines_of
    from torch_memory_saver.observe._processes.view import as_json

    while True:
        view = look()
        if arguments.json:
            text = json.dumps(as_json(view))
        else:
            lines = lines_of(view, width(), sort=arguments.sort, pattern=arguments.filter)
            text = "\n".join(line.text for line in lines)
        write_line(text)
        if arguments.once:
            return 0
        _sleep(arguments.interval)
        if not arguments.json:
            print()


def _sleep(seconds: float) -> None:
    """Sleep in short steps, because Ctrl-C that comes just before a sleep begins does not shorten it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _TICK_S))


def look() -> View:
    """Return a view of the memory that processes hold now. On a simulated machine, processes of other machines are left
    out."""
    from torch_memory_saver.observe._nvml import read_gpus
    from torch_memory_saver.observe._processes.names import command_name, user_of
    from torch_memory_saver.observe._processes.shared_pages import read_pages
    from torch_memory_saver.observe._processes.view import Program, make_view, pages_on

    pages, gpus = read_pages(), read_gpus()
    if os.environ.get(_startup.SIMULATED) and gpus.gpus:
        pages = pages_on(pages, gpus)
    pids = {page.pid for page in pages.pages if not page.foreign}
    pids |= {process.pid for gpu in gpus.gpus for process in gpu.processes}
    programs = {pid: Program(command_name(pid), user_of(pid)) for pid in pids}
    store, unreadable = _read_store()
    return make_view(pages, gpus, time.monotonic_ns(), programs, store, unreadable)


def _read_store() -> tuple[StoreView | None, dict[str, str]]:
    """Return the shared store of this user, and why it cannot be read, by path."""
    from torch_memory_saver._shared_folder import VARIABLE, store_path
    from torch_memory_saver.observe._processes.view import StoreView
    from torch_memory_saver.observe._store.contents import read_store

    try:
        contents = read_store(store_path())
    except FileNotFoundError:  # no process has used it yet
        return None, {}
    except OSError as error:
        return None, {printable(str(error.filename or VARIABLE)): str(error.strerror or error)}
    path = printable(str(contents.path))
    return StoreView(path, contents.bytes, len(contents.objects), contents.holders), {}
