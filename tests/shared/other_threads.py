"""Another thread of a test, whose exception is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_thread(work: Callable[[], object]) -> None:
    """Runs `work` on another thread and hands its exception on."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    if failures:
        raise failures[0]
