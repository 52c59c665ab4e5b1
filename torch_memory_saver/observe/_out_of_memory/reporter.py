"""The reporter of this process: make reports of failures, log them or write them to files, and explain errors.

`attach_observer` is called at the first use of this package, and has PyTorch report its own errors. `start_reports` is the
recording `oom` of TMS_DEBUG, which has reports written to files without a change of the program.

Any thread may call, also a thread of C++ on which PyTorch calls its observers. Nothing is shared between threads but a
counter and the list of files. A report that is being made keeps later failures of its thread from being reported, such as
one in a handler of the log.

Modules that most processes never need are imported with the first report, or by `start_reports`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_memory_saver._services import layer
from torch_memory_saver._text import binary_size, with_points, with_sentence
from torch_memory_saver.errors import OutOfMemoryError
from torch_memory_saver.observe._out_of_memory.failure import Failure, failure_of_error, failure_of_torch

if TYPE_CHECKING:
    from torch_memory_saver.observe._out_of_memory.account import Account
    from torch_memory_saver.observe._out_of_memory.folder import ReportFolder

__all__ = ["Reporter", "attach_observer", "explain", "reporter", "start_reports"]

logger = logging.getLogger("torch_memory_saver")


class _Thread(threading.local):
    #: Whether this thread is making a report.
    inside = False


class Reporter:
    """The maker of reports. Without a folder no file is written, and only messages say who holds the memory."""

    def __init__(self) -> None:
        self._folder: ReportFolder | None = None
        self._numbers = itertools.count(1)
        self._thread = _Thread()

    def write_to(self, folder: ReportFolder | None) -> None:
        """Set the folder for reports from now on. With None no reports are written."""
        self._folder = folder

    def explain(self, error: OutOfMemoryError, tags: tuple[str, ...] | None) -> None:
        """Report an error of this package that is about to reach the program. This is called once, after the last attempt.
        The message of the error gets the largest holder in its first line, and the path of the report.

        Args:
            error: Error to report.
            tags: Tags that the resume selects, or None for every tag.
        """

        def use(account: Account, *points: str) -> None:
            error.args = (with_points(with_sentence(str(error), account.sentence), *points),)

        self._attempt(lambda: self._report(lambda: failure_of_error(error, tags), use))

    def observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Report an error of PyTorch, which calls this observer before it raises the error. The error's text is PyTorch's,
        so the explanation is logged. Without a folder a line is logged only if ``empty_cache()`` would give back managed
        memory, or if there is paused memory. PyTorch's text counts paused memory as allocated."""
        message = f"PyTorch needs {binary_size(requested)} on device {device} and has {binary_size(free)} free."

        def use(account: Account, *points: str) -> None:
            from torch_memory_saver.observe._out_of_memory.account import limit_sentence

            points = (account.paused_sentence, limit_sentence(device, allowed), account.slack_sentence, *points)
            logger.warning("%s", with_points(with_sentence(message, account.sentence), *points))

        if self._folder is None:
            self._attempt(lambda: self._log_causes(device, allowed, message))
            return

        self._attempt(lambda: self._report(lambda: failure_of_torch(device, requested, allowed), use))

    def restart(self) -> None:
        """Begin again in a forked child, which has one thread and none of its parent's reports."""
        self._numbers = itertools.count(1)
        self._thread = _Thread()
        if self._folder is not None:
            self._folder.restart()

    @property
    def writes_reports(self) -> bool:
        """Whether reports go to a folder."""
        return self._folder is not None

    def _log_causes(self, device: int, allowed: int, message: str) -> None:
        from torch_memory_saver.observe._out_of_memory.account import idle_sentence, limit_sentence, paused_sentence

        sentences = [*filter(None, (paused_sentence(device), limit_sentence(device, allowed), idle_sentence(device)))]
        if sentences:
            logger.warning("%s", with_points(message, *sentences))

    def _report(self, make_failure: Callable[[], Failure], use: Callable[..., None]) -> None:
        """Write the report, if there is a folder. Then call `use` with the account and points for a message."""
        from torch_memory_saver.observe._out_of_memory.account import take_account

        failure = make_failure()
        account = take_account(failure.device)
        path = None if self._folder is None else self._write(self._folder, failure, account)
        use(account, account.idle_sentence, "" if path is None else f"Report: {path}")

    def _attempt(self, report: Callable[[], None]) -> None:
        """Call `report`, unless this thread is making a report. Never raise an Exception."""
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
        from torch_memory_saver.observe._out_of_memory.content import collect
        from torch_memory_saver.observe._out_of_memory.text import format_report

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
os.register_at_fork(after_in_child=reporter.restart)


def explain(error: OutOfMemoryError, tags: tuple[str, ...] | None) -> None:
    """Report an error of a resume by the reporter of this process."""
    reporter.explain(error, tags)


#: The modules torch whose observer is ours. PyTorch cannot remove an observer, and a forked child inherits it.
_observed: list[Any] = []


def attach_observer(torch: Any) -> None:
    """Add our observer to those of PyTorch, whose CUDA is initialised. Does nothing the second time."""
    if any(torch is observed for observed in _observed):
        return
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    try:
        if attach is None:
            raise RuntimeError(f"PyTorch {torch.__version__} has no observers")
        attach(reporter.observe)
    except RuntimeError as error:  # an allocator in place of PyTorch's own, too
        level = logging.WARNING if reporter.writes_reports else logging.DEBUG
        logger.log(level, "PyTorch's own out-of-memory errors are not reported, because it takes no observer: %s", error)
        return
    _observed.append(torch)


def start_reports(directory: str) -> None:
    """Have reports written to a folder. PyTorch's own errors are observed as soon as the process uses CUDA, if PyTorch is
    imported by now; otherwise as soon as this package uses it. Initialises nothing."""
    # Imported now, not where memory is short.
    from torch_memory_saver.observe._out_of_memory import content, text  # noqa: F401
    from torch_memory_saver.observe._out_of_memory.folder import ReportFolder

    reporter.write_to(ReportFolder(os.path.abspath(directory)))
    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        attach_observer(torch)
        return
    layer.at_first_use(attach_observer)
    call_when_initialized = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if call_when_initialized is not None:
        call_when_initialized(partial(attach_observer, torch))
