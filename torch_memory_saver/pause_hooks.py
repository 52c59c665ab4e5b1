"""What a program's callbacks around a pause or resume are and receive. Plain classes: the registry and the calls are in
``_saver/hook_registry.py`` and ``_saver/hook_calls.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_memory_saver.report import PauseReport, ResumeReport

__all__ = ["Hook", "HookCall", "HookHandle"]


@dataclass(frozen=True)
class HookCall:
    """What a callback is told of the call around it: those allocations of the hook's tags that the call selects and that
    were not yet in the state that it brings about, as they were when it began.

    Attributes:
        operation: "pause" or "resume".
        tags: Their tags, in alphabetical order; at least one.
        devices: Their devices, in ascending order.
        allocations: Their number.
        bytes: Their physical memory.
        report: What the call returns. None before it, and if the call raises.
        error: For after-callbacks: the exception that the call raises although it has paused or resumed memory of these
            tags, such as a DriverError for the part that is damaged. None otherwise.
    """

    operation: str
    tags: tuple[str, ...]
    devices: tuple[int, ...]
    allocations: int
    bytes: int
    report: PauseReport | ResumeReport | None = None
    error: BaseException | None = None


class Hook:
    """Callbacks around a pause, or around a resume, that belong together. Override what is needed, and pass an instance to
    :meth:`TorchMemorySaver.on_pause` or :meth:`TorchMemorySaver.on_resume`."""

    def before(self, call: HookCall) -> None:
        """Before the call changes anything. If it raises, the call does not take place, and the exception is raised by it.
        It must then have undone what it did itself."""

    def after(self, call: HookCall) -> None:
        """After the call. If it raises, the memory stays paused or resumed, and the call raises the exception after all
        other after-callbacks were called."""

    def cancelled(self, error: BaseException) -> None:
        """In place of :meth:`after`, if ``before`` has returned and the call then changes nothing of these tags, because of
        `error`. What it raises is logged."""


class HookHandle:
    """A registered callback or hook, which lives until it is removed."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Ends the registration. Does nothing the second time. In a call that has begun, ``after`` or ``cancelled`` still
        follows a ``before`` that was called."""
        self._remove()
