"""A store of torch.distributed in memory, and ranks that use it in an order that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch_memory_saver.ranks.vote import Clock


class MemoryStore:
    """The store itself, for any thread."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return self.values.keys() >= set(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class EndedClock(Clock):
    """A clock whose timeout has passed when a rank looks at it for the first time."""

    @property
    def has_ended(self) -> bool:
        return True


class Killed(BaseException):
    """Ends the thread of a rank that is killed."""


class SteppedRank:
    """A rank on a thread of its own, which stops before each method of the store and each sleep until :meth:`step`.

    Attributes:
        timed_out: Whether the timeout of the current wait has passed.
        ended: Whether the program of the rank has returned, or the rank was killed.
        meets: Whether the rank has stopped in :meth:`meet`.
    """

    def __init__(self, store: MemoryStore, program: Callable[[SteppedRank], None]) -> None:
        self._store = store
        self._program = program
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._checked: list[str] = []
        self._sleeps = False
        self.timed_out = False
        self.ended = False
        self.meets = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    @property
    def waits(self) -> bool:
        """Whether the rank sleeps until there is a key, which is missing."""
        return self._sleeps and not self._store.check(self._checked)

    def step(self) -> None:
        """Lets the rank go on until its next stop. A wait for a key that is missing ends at its timeout."""
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        self._killed = True
        self.step()

    def meet(self) -> None:
        """Stops until the test lets all ranks go on."""
        self.meets = True
        self._stop()
        self.meets = False

    def sleep(self) -> None:
        self._sleeps = True
        self._stop()
        self.timed_out = self.waits
        self._sleeps = False

    def _run(self) -> None:
        try:
            self._program(self)
        except Killed:
            pass
        finally:
            self.ended = True
            self._stopped.release()

    def _stop(self) -> MemoryStore:
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise Killed
        return self._store

    def set(self, key: str, value: str) -> None:
        self._stop().set(key, value)

    def get(self, key: str) -> bytes:
        return self._stop().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._stop().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._checked = keys
        return self._stop().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._stop().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._stop().delete_key(key)


class SteppedClock(Clock):
    """The clock of a rank that a test steps."""

    def __init__(self, rank: SteppedRank, seconds: float) -> None:
        self._rank = rank
        super().__init__(seconds)

    def restart(self) -> None:
        self._rank.timed_out = False

    @property
    def has_ended(self) -> bool:
        return self._rank.timed_out

    def sleep(self) -> None:
        self._rank.sleep()
