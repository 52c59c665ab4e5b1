"""Requests of other processes, served after each pause and resume: the side of the process that is asked.

On the thread of the call, after it. Without a request that costs the reading of one word.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver._diagnostics.processes.pages import read_pages
from torch_memory_saver._engine.background import after_call
from torch_memory_saver._files import default_role, own_rank, write_text_file

__all__ = ["RESULT_SUFFIXES", "result_path", "start_serving"]

logger = logging.getLogger("torch_memory_saver")

#: The end of the name of the file for each request, in place of ".page".
RESULT_SUFFIXES = {"snapshot": ".snapshot.json", "events": ".events.json"}
_FILE_MODE = 0o600
_NO_RANK = -1


def result_path(page: Path, kind: str) -> Path:
    """The file that a process writes for a request, beside its page."""
    return page.with_suffix(RESULT_SUFFIXES[kind])


def start_serving() -> None:
    """Has requests served from now on, in this process and in forked children, and tells the page who this process is.
    Removes the pages that killed processes left behind. Called once in a process."""
    with contextlib.suppress(OSError):  # the commands that list pages report it
        read_pages()
    server = _Server()
    server.describe()
    after_call.add("requests of other processes", server.serve)
    os.register_at_fork(after_in_child=server.describe)


class _Server:
    """Serves requests. The rank is often known only after the first use of the package: it is looked up again at the first
    call, and with each request."""

    def __init__(self) -> None:
        self._called = False

    def describe(self) -> None:
        """Tells the page the role and the rank."""
        name = default_role().replace("\0", " ").strip() or "python"
        rank = own_rank()
        _core.set_page_role(name, _NO_RANK if rank is None else rank, serves=True)

    def serve(self) -> None:
        """Serves what is requested now."""
        requests = _core.page_requests()
        if requests == 0 and self._called:
            return
        self._called = True
        self.describe()
        page = _core.page_path()
        if page is None:
            return
        for number, kind in enumerate(_core.PAGE_REQUESTS):
            if requests >> number & 1:
                _serve(number, kind, Path(page))


def _serve(number: int, kind: str, page: Path) -> None:
    """Writes the file, and counts the request. A failure is told to those who wait, who show it, and is logged here."""
    target = result_path(page, kind)
    try:
        text = json.dumps(_CONTENTS[kind](), separators=(",", ":"))
        write_text_file(text, target, kind, "a file for another process was", mode=_FILE_MODE)
    except Exception as error:
        logger.warning("a request of another process: %s could not be written", target, exc_info=True)
        _core.page_serve(number, False, getattr(error, "errno", None) or 0)
        return
    _core.page_serve(number, True)
    logger.info("a request of another process: wrote %s", target)


def _snapshot() -> object:
    from torch_memory_saver.reports.usage import take_stats

    return take_stats().as_dict()


def _events() -> object:
    from torch_memory_saver.events.event_file import log_to_json
    from torch_memory_saver.events.log import events

    return log_to_json(events())


#: What is written for each request, as plain data.
_CONTENTS: dict[str, Callable[[], object]] = {"snapshot": _snapshot, "events": _events}
