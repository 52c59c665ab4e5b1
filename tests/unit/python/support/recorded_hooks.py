"""Hooks that record how they are called, and allocations of several tags for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.hooks import Hook, HookCall, HookHandle
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
SIZE = 2 * MIB
TIMEOUT_S = 60
#: So many allocations of one size need so many addresses that the last four are neighbours, which share a run.
RUN_OF_FOUR = 8

#: A tag never goes away, so each test has names of its own.
_numbers = itertools.count()


class Gate:
    """Holds a callback until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S)


class Recorder:
    """Registers hooks that append (name, callback) to `events`. `raises` says which of them raise what."""

    def __init__(self, saver: TorchMemorySaver) -> None:
        self.saver = saver
        self.space = f"hooks{next(_numbers)}"
        self.events: list[tuple[str, str]] = []
        self.received: dict[tuple[str, str], Any] = {}
        self.raises: dict[tuple[str, str], BaseException] = {}
        self.does: dict[tuple[str, str], Callable[[], object]] = {}
        self.handles: list[HookHandle] = []
        self.addresses: list[int] = []

    def tag(self, name: str) -> str:
        return f"{self.space}/{name}"

    def allocate(self, *names: str, backup: int = _core.BACKUP_NONE, device: int = 0) -> list[int]:
        """Allocates 2 MiB with each tag."""
        made = []
        for name in names:
            with core_region(self.tag(name), backup, True):
                made.append(_core.allocate(SIZE, device))
        self.addresses += made
        return made

    def make_slack(self, name: str, backup: int = _core.BACKUP_NONE, device: int = 0) -> list[int]:
        """Allocates with the tag so that a run of four is made, and frees one of them: the other three are the result. No
        hook is called."""
        made = self.allocate(*[name] * RUN_OF_FOUR, backup=backup, device=device)
        for operation in (_core.pause, _core.resume):
            operation((self.tag(name),), None)
        freed = made[-2]
        _core.free(freed)
        self.addresses.remove(freed)
        return [made[-4], made[-3], made[-1]]

    def called(self, name: str, callback: str, argument: Any) -> None:
        key = (name, callback)
        self.events.append(key)
        self.received[key] = argument
        if key in self.does:
            self.does[key]()
        if key in self.raises:
            raise self.raises[key]

    def hook(self, name: str) -> Hook:
        recorder = self

        class Recorded(Hook):
            def before(self, call: HookCall) -> None:
                recorder.called(name, "before", call)

            def after(self, call: HookCall) -> None:
                recorder.called(name, "after", call)

            def cancelled(self, error: BaseException) -> None:
                recorder.called(name, "cancelled", error)

        return Recorded()

    def on_pause(self, name: str, tag: Any = None) -> HookHandle:
        return self.keep(self.saver.on_pause(tag, self.hook(name)))

    def on_resume(self, name: str, tag: Any = None) -> HookHandle:
        return self.keep(self.saver.on_resume(tag, self.hook(name)))

    def keep(self, handle: HookHandle) -> HookHandle:
        """Has the handle removed at the end of the test."""
        self.handles.append(handle)
        return handle

    def take_events(self) -> list[str]:
        """What was called since the last time."""
        taken, self.events[:] = [" ".join(event) for event in self.events], []
        return taken

    def states(self) -> set[int]:
        """The states of all allocations."""
        return {found.state for address in self.addresses if (found := _core.find(address)) is not None}

    def free_all(self) -> None:
        """Frees what was allocated."""
        while self.addresses:
            _core.free(self.addresses.pop())

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.free_all()
