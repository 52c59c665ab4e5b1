"""Another thread of a test, whose exception is the test's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


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


@contextlib.contextmanager
def other_thread_inside(
    region: contextlib.AbstractContextManager[object],
    first: Callable[[], object] = lambda: None,
    last: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Keeps another thread in `region` during a block. It calls `first` before the block, and `last` after it."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with region:
            first()
            inside.set()
            assert leave.wait(60)
            last()

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        leave.set()
        thread.join(60)
