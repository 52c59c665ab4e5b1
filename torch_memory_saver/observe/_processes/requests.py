"""Requests: have another process of this user write a file beside its page, at its next pause or resume.

`request_file` is the side of the process that asks. `start_serving` is the side of the process that is asked: it serves on
the thread of each pause and resume, after the call and without a lock. Without a request that costs the reading of one word.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank, write_file, write_text_file
from torch_memory_saver._folders import private_directory
from torch_memory_saver._services import after_call
from torch_memory_saver._text import printable
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.observe._processes.shared_pages import (
    Page,
    is_alive,
    open_page,
    own_namespace,
    page_directory,
    read_page,
    read_pages,
)

__all__ = ["RESULT_SUFFIXES", "request_file", "result_path", "start_serving"]
logger = logging.getLogger("torch_memory_saver")

#: Suffixes that replace ".page" in the name of the page to form the name of the file for each request.
RESULT_SUFFIXES = {"snapshot": ".snapshot.pickle", "events": ".events.json"}
#: Seconds between two looks at the page.
_PERIOD_S = 0.05
_NO_RANK = -1


def request_file(
    pid: int,
    kind: str,
    timeout: float | None = None,
    *,
    on_wait: Callable[[], None] = lambda: None,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Request a file from a process and wait until it is written. A request that is not served is withdrawn, even if an
    exception such as Ctrl-C ends the wait.

    Args:
        pid: Number of the process.
        kind: One of ``_core.PAGE_REQUESTS``.
        timeout: Maximum number of seconds to wait. None waits until the process ends.
        on_wait: Called once, when the request is made.
        wait: Function that sleeps for the given number of seconds. Tests pass their own.

    Returns:
        The path of the file, which the process may replace at a later request.

    Raises:
        InvalidArgumentError: There is no such process, or its page cannot be used. The message gives the reason.
        InvalidStateError: The process did not serve the request in time, failed to serve it, or ended.
    """
    number = _core.PAGE_REQUESTS.index(kind)
    found = _find(pid)
    with _opened(found) as descriptor:
        page = _look(descriptor, found)
        before = (page.served_total[number], page.unserved_total[number])
        _core.request_page(descriptor, number)
        try:
            on_wait()
            _await(descriptor, page, number, before, timeout, wait)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says more
                _core.request_page(descriptor, number, withdraw=True)
            raise
    return result_path(page.path, kind)


def start_serving() -> None:
    """Serve requests from now on, in this process and in forked children, and write the identity of this process to its
    page. Remove the pages that killed processes left behind. This function is called once in a process."""
    with contextlib.suppress(OSError):  # the commands that list pages report it
        read_pages()
    server = _Server()
    server.describe()
    after_call.add("requests of other processes", server.serve)
    os.register_at_fork(after_in_child=server.describe)


def result_path(page: Path, kind: str) -> Path:
    """Return the file that a process writes for a request, beside its page."""
    return page.with_suffix(RESULT_SUFFIXES[kind])


def _await(
    descriptor: int,
    page: Page,
    number: int,
    before: tuple[int, int],
    timeout: float | None,
    wait: Callable[[float], None],
) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        # Looked at before the page: what a process has written before it ended counts.
        alive = is_alive(descriptor, page)
        now = _look(descriptor, page)
        if now.served_total[number] != before[0]:
            return
        if now.unserved_total[number] != before[1]:
            reason = os.strerror(now.serve_error[number]) if now.serve_error[number] else "its log says why"
            raise InvalidStateError(f"process {page.pid} could not write a file in {page.path.parent}: {reason}")
        if not alive:
            raise InvalidStateError(f"process {page.pid} has ended before it served the request")
        if end is not None and time.monotonic() >= end:
            raise InvalidStateError(
                f"process {page.pid} did not pause or resume within {timeout:g} s; the request is withdrawn: wait longer "
                "with --timeout"
            )
        if not now.requests >> number & 1:  # another one's request was served while this one was made
            _core.request_page(descriptor, number)
        wait(_PERIOD_S)


@contextlib.contextmanager
def _opened(page: Page) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_directory(page.path.parent))
            descriptor = stack.enter_context(open_page(folder, page.path.name, os.O_RDWR))
        except FileNotFoundError as error:
            raise InvalidStateError(f"process {page.pid} has just ended") from error
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"the page of process {page.pid} cannot be opened: {error}") from error
        yield descriptor


def _look(descriptor: int, page: Page) -> Page:
    try:
        return read_page(descriptor, page.path)
    except (OSError, ValueError) as error:
        raise InvalidStateError(f"the page of process {page.pid} cannot be read: {error}") from error


def _find(pid: int) -> Page:
    """Return the page of a live process of this user and PID namespace."""
    directory = page_directory()
    pages = read_pages(directory)
    named = [page for page in pages.pages if page.pid == pid]
    own = [page for page in named if not page.foreign]
    if own:
        if not own[0].serves:
            raise InvalidArgumentError(
                f"process {pid} serves no requests: it uses the native library without this Python package"
            )
        return own[0]
    raise InvalidArgumentError(_why_not(pid, directory, bool(named), pages.unreadable))


def _why_not(pid: int, directory: Path, is_foreign: bool, unreadable: dict[str, str]) -> str:
    """Return why a process has no page that can be used, and what to do."""
    for path, why in unreadable.items():
        if path == printable(str(directory)):
            return f"the directory of the pages, {path}, cannot be used: {why}"
        if Path(path).name.startswith(f"tms-{pid}-"):
            return f"the page {path} of process {pid} cannot be used: {why}"
    elsewhere = "is in another PID namespace, such as a container's: run this command there"
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        if is_foreign:
            return f"process {pid} {elsewhere}"
        return f"there is no process {pid}"
    if owner != os.geteuid():
        return f"process {pid} belongs to another user (uid {owner}): run this command as that user"
    with contextlib.suppress(OSError):
        namespace = own_namespace()
        if namespace and os.stat(f"/proc/{pid}/ns/pid").st_ino != namespace:
            return f"process {pid} {elsewhere}"
    return (
        f"process {pid} has no page in {directory}: it has not allocated managed memory yet, was started with "
        "TMS_SHARED_PAGE=0 or another directory in it, or runs another release of torch_memory_saver"
    )


class _Server:
    """The server of requests in this process. The rank is often known only after the first use of the package: it is looked
    up again at the first call, and with each request."""

    def __init__(self) -> None:
        self._called = False

    def describe(self) -> None:
        """Write the role and the rank, as they are now, into the page."""
        name = default_role().replace("\0", " ").strip() or "python"
        rank = own_rank()
        _core.set_page_role(name, _NO_RANK if rank is None else rank, serves=True)

    def serve(self) -> None:
        """Serve what is requested now."""
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
    """Write the file and count the request. A failure is logged here, and reported to the waiting processes, which show
    it."""
    target = result_path(page, kind)
    try:
        _WRITERS[kind](target)
    except Exception as error:
        logger.warning("a request of another process: %s could not be written", target, exc_info=True)
        _core.page_serve(number, False, getattr(error, "errno", None) or 0)
        return
    _core.page_serve(number, True)
    logger.info("a request of another process: wrote %s", target)


def _write_snapshot(target: Path) -> None:
    from torch_memory_saver.observe.memory.snapshots import take_snapshot

    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():  # to look must not make PyTorch begin to use a device
        raise InvalidStateError("a snapshot shows PyTorch's memory, and PyTorch uses no device in this process")
    write_file(take_snapshot(), target, aside=target.parent)


def _write_events(target: Path) -> None:
    from torch_memory_saver.observe.events.event_file import log_to_json
    from torch_memory_saver.observe.events.log import events

    text = json.dumps(log_to_json(events()), separators=(",", ":"))
    write_text_file(text, target, "events", "a file for another process was")


#: Writes the file of each request.
_WRITERS: dict[str, Callable[[Path], None]] = {"snapshot": _write_snapshot, "events": _write_events}
