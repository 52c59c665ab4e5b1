"""The context managers of region() and disable(). Classes rather than generators, because entering one must cost
microseconds.

Each enters a level of settings of the native core and, where torch is in play, routes pools. Leaving restores what was in
force whatever happened inside; leaving an outer one first also leaves those inside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType

from torch_memory_saver import _core
from torch_memory_saver.errors import ForkedProcessError, TorchMemorySaverError
from torch_memory_saver.pools import Frame, PoolStore
from torch_memory_saver.torch_layer import TorchCuda

__all__ = ["Disabled", "Region"]

logger = logging.getLogger("torch_memory_saver")


class _Level(ContextDecorator):
    """One level of settings. An object may be entered again after it was left; not twice at once."""

    def __init__(
        self,
        store: PoolStore,
        find_torch: Callable[[], TorchCuda | None],
        tag: str,
        backup: int,
        managed: bool,
        host_policy: int = _core.HOST_DEFAULT,
    ) -> None:
        self._store = store
        self._find_torch = find_torch
        self._tag = tag
        self._backup = backup
        self._managed = managed
        self._host_policy = host_policy
        self._frames: list[tuple[Frame, int]] = []

    def __enter__(self) -> None:
        torch = self._find_torch()
        depth = _core.region_push(self._tag, self._backup, self._managed, self._host_policy)
        frame: Frame | None = None
        try:
            frame = self._store.enter(torch, self._tag, self._backup, self._managed, self._host_policy)
            self._frames.append((frame, depth))
        except BaseException:
            _core.region_pop(depth)
            if frame is not None:  # A signal's exception came when it had been entered.
                self._store.leave(frame)
                self._frames[:] = [entered for entered in self._frames if entered[0] is not frame]
            raise
        if torch is not None and not self._store.single_device:
            try:
                _core.refresh_peers()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        frame, depth = self._frames.pop()
        if frame.closed:
            return  # An outer level was left first, and took this one with it.
        if frame.thread == threading.get_ident():
            _core.region_pop(depth)
        else:
            logger.warning(
                "region(tag=%r) was entered on another thread than it was left on: the native settings of that thread stay",
                self._tag,
            )
        self._store.leave(frame)
        if frame.torch is not None and not self._store.single_device:
            try:
                _core.refresh_peers()
            except ForkedProcessError:
                pass  # A process forked inside the region leaves it as well, and has no memory to share.
            except TorchMemorySaverError as error:
                if exception is None:
                    raise
                # What the region's body raised must not be lost.
                logger.warning("leaving region(tag=%r) after an exception: %s", self._tag, error)


class Region(_Level):
    """What region() returns."""

    def __init__(
        self,
        store: PoolStore,
        find_torch: Callable[[], TorchCuda | None],
        tag: str,
        backup: int,
        host_policy: int = _core.HOST_DEFAULT,
    ) -> None:
        super().__init__(store, find_torch, tag, backup, True, host_policy)

    def _recreate_cm(self) -> Region:
        return Region(self._store, self._find_torch, self._tag, self._backup, self._host_policy)


class Disabled(_Level):
    """What disable() returns."""

    def __init__(self, store: PoolStore, find_torch: Callable[[], TorchCuda | None], tag: str) -> None:
        super().__init__(store, find_torch, tag, _core.BACKUP_NONE, managed=False)

    def _recreate_cm(self) -> Disabled:
        return Disabled(self._store, self._find_torch, self._tag)
