"""The reports of this process: when one is made, and what the program gets to see of it.

Any thread may call, also a thread of C++ on which PyTorch calls its observers. Nothing is shared between threads but a
counter and the list of files. A report that is being made keeps later failures of its thread from being reported, such as
one in a handler of the log.

What most processes never need is imported with the first report, or by from_environment.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch_memory_saver._diagnostics.out_of_memory.failure import Failure, failure_of_error, failure_of_torch
from torch_memory_saver.errors import OutOfMemoryError

if TYPE_CHECKING:
    from torch_memory_saver._diagnostics.out_of_memory.account import Account
    from torch_memory_saver._diagnostics.out_of_memory.folder import ReportFolder

__all__ = ["Reporter", "reporter"]

logger = logging.getLogger("torch_memory_saver")


class _Thread(threading.local):
    #: Whether this thread is making a report.
    inside = False


class Reporter:
    """Makes the reports. Without a folder no file is written, and only messages say who holds the memory."""

    def __init__(self) -> None:
        self._folder: ReportFolder | None = None
        self._numbers = itertools.count(1)
        self._thread = _Thread()

    def write_to(self, folder: ReportFolder | None) -> None:
        """Where the reports go from now on; None: nowhere."""
        self._folder = folder

    def explain(self, error: OutOfMemoryError, tags: tuple[str, ...] | None) -> str:
        """Reports an error of this package that is about to reach the program: once, after its last attempt. Its message
        gets the largest holder and the path of the report.

        Args:
            error: Which.
            tags: What the resume selects; None: every tag.

        Returns:
            What the message got; "" if nothing could be found out.
        """
        added = ""

        def use(addition: str) -> None:
            nonlocal added
            added = addition
            error.args = (f"{error}{addition}",)

        self._attempt(lambda: self._report(lambda: failure_of_error(error, tags), use))
        return added

    def observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        """PyTorch's observer: called before it raises its own error, whose text is PyTorch's. The log gets the rest. Without
        a folder there is a line only if ``empty_cache()`` would return managed memory."""
        del free  # read again, with the total

        def use(addition: str) -> None:
            logger.warning("PyTorch is out of memory on device %d, %d bytes were requested.%s", device, requested, addition)

        if self._folder is None:
            self._attempt(lambda: self._log_idle(device, use))
            return

        self._attempt(lambda: self._report(lambda: failure_of_torch(device, requested, allowed), use, names_slack=True))

    def begin_anew(self) -> None:
        """In a forked child, which has none of its parent's reports, and one thread."""
        self._numbers = itertools.count(1)
        self._thread = _Thread()
        if self._folder is not None:
            self._folder.begin_anew()

    @property
    def writes_reports(self) -> bool:
        """Whether reports go to a folder."""
        return self._folder is not None

    def _log_idle(self, device: int, use: Callable[[str], None]) -> None:
        from torch_memory_saver._diagnostics.out_of_memory.account import idle_sentence

        sentence = idle_sentence(device)
        if sentence:
            use(sentence)

    def _report(self, make_failure: Callable[[], Failure], use: Callable[[str], None], names_slack: bool = False) -> None:
        """`names_slack`: the text says what is slack. Messages of the native core do that themselves."""
        from torch_memory_saver._diagnostics.out_of_memory.account import take_account

        failure = make_failure()
        account = take_account(failure.device)
        path = None if self._folder is None else self._write(self._folder, failure, account)
        slack = account.slack_sentence if names_slack else ""
        use(f"{account.sentence}{slack}{account.idle_sentence}{'' if path is None else f' Report: {path}'}")

    def _attempt(self, report: Callable[[], None]) -> None:
        """Calls `report`, unless this thread is making a report. Raises no Exception."""
        if self._thread.inside:
            return
        self._thread.inside = True
        try:
            report()
        except Exception:
            with contextlib.suppress(Exception):  # the log may fail for the same reason, and the program has its error
                logger.warning("the out-of-memory report failed", exc_info=True)
        finally:
            self._thread.inside = False

    def _write(self, folder: ReportFolder, failure: Failure, account: Account) -> Path | None:
        from torch_memory_saver._diagnostics.out_of_memory.content import collect
        from torch_memory_saver._diagnostics.out_of_memory.text import format_report

        report = collect(failure, account, next(self._numbers))
        return folder.write(
            format_report(report, account.ledger),
            json.dumps(report, indent=1),
            number=report["number"],
            rank=(report["process"] or {}).get("rank"),
            time_ns=report["time_ns"],
        )


#: This process's.
reporter = Reporter()
os.register_at_fork(after_in_child=reporter.begin_anew)
