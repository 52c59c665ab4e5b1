"""A store of torch.distributed in memory, and ranks that use it in an order that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta


class MemoryStore:
    """The store itself. A wait for a key that is missing ends at once, as if its timeout had passed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return self.values.keys() >= set(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class Killed(BaseException):
    """Ends the thread of a rank that is killed."""


class SteppedRank:
    """A rank on a thread of its own, which stops before each method of the store until :meth:`step`.

    Attributes:
        waits: Whether the next method is a wait for a key that is missing.
        ended: Whether the program of the rank has returned, or the rank was killed.
    """

    def __init__(self, store: MemoryStore, program: Callable[[SteppedRank], None]) -> None:
        self._store = store
        self._program = program
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._missing: list[str] = []
        self.ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    @property
    def waits(self) -> bool:
        return bool(self._missing) and not self._store.check(self._missing)

    def step(self) -> None:
        """Lets the rank carry out its next method. A wait for a key that is missing ends at its timeout."""
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        self._killed = True
        self.step()

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
        return self._stop().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._stop().compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._missing = keys
        try:
            self._stop().wait(keys, timeout)
        finally:
            self._missing = []

    def delete_key(self, key: str) -> bool:
        return self._stop().delete_key(key)
