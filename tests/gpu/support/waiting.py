"""Actions while a pause or resume of the main thread waits, without guessing when that is."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from gpu_support import core

#: Seconds between two signals.
_PERIOD_S = 0.005


@contextlib.contextmanager
def while_waiting(action: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Runs `action` once, on the main thread, while a pause or resume in the block waits and `ready()` holds: from a signal
    handler, which the call lets run at such times. What `action` raises, the call raises."""
    done, over = threading.Event(), threading.Event()
    handling = threading.Lock()  # the next signal may interrupt the handler anywhere. Held for good from the action on

    def handle(number: int, frame: FrameType | None) -> None:
        if not handling.acquire(blocking=False):
            return
        if core.in_transition() and ready():
            done.set()
            action()
        else:
            handling.release()

    def knock() -> None:
        while not done.is_set() and not over.wait(_PERIOD_S):
            os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the default action would kill, if a signal were still pending
    assert done.is_set(), "the call ended without having waited"


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
