"""The options of one call that begins a region, pauses or resumes: a frozen object, checked once, that every lower
layer passes on unchanged. native.py converts it to the core's arguments.

The implementation's methods create it first. The saver passes them keywords, because the implementation may be a registered
one: that is the contract of ``register_hook_mode``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.arguments import (
    PAUSE_TIMEOUT_S,
    check_flag,
    check_if_shared,
    check_progress,
    check_switch,
    check_tag,
    check_timeout,
    choose_backup,
    choose_host_policy,
    choose_pause_backup,
)
from torch_memory_saver._saver.patterns import select_tags
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["PauseOptions", "RegionOptions", "ResumeOptions"]

Progress = Callable[[int, int], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionOptions:
    """The checked options of a region, of memory or of a graph, which apply to allocations inside.

    Attributes:
        tag: The name by which pause and resume select.
        backup: The core's number for the kind of backup.
        host_policy: The core's number for the policy for the backups' host memory after a resume.
        managed: False: allocations inside are ordinary.
        runs: False: each allocation keeps a physical handle of its own.
    """

    tag: str
    backup: int
    host_policy: int
    managed: bool
    runs: bool = True

    @classmethod
    def check(
        cls,
        tag: object,
        enable_cpu_backup: object,
        enable_disk_backup: object,
        cpu_backup_backend: object,
        host_memory: object,
        runs: object = True,
    ) -> RegionOptions:
        """
        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.region`.
        """
        backup = choose_backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        return cls(check_tag(tag), backup, choose_host_policy(host_memory), managed=True, runs=check_switch("runs", runs))

    @classmethod
    def disabled(cls, tag: str) -> RegionOptions:
        """The options of disable() in a region of the tag."""
        return cls(tag, _core.BACKUP_NONE, _core.HOST_DEFAULT, managed=False)

    def unmanaged(self) -> RegionOptions:
        """The same for ordinary memory."""
        return dataclasses.replace(self, managed=False)


@dataclasses.dataclass(frozen=True, slots=True)
class PauseOptions:
    """The checked options of a pause.

    Attributes:
        tags: The names; None is every tag.
        backup: The core's number for the kind of backup; None: the backups of the regions.
        live_only: Free blocks are not copied.
        progress: Told of the copies.
        if_shared: "allow", "wait" or "refuse": what to do about memory that other processes may still use.
        deadline: The end of all waiting of the call, in seconds of :func:`time.monotonic`.
    """

    tags: tuple[str, ...] | None
    backup: int | None
    live_only: bool
    progress: Progress | None
    if_shared: str
    deadline: float

    @classmethod
    def check(
        cls,
        tag: object,
        backup: object,
        live_only: object,
        progress: object,
        if_shared: object = "allow",
        timeout: object = PAUSE_TIMEOUT_S,
    ) -> PauseOptions:
        """
        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.pause`.
        """
        return cls(
            select_tags(tag),
            choose_pause_backup(backup),
            check_flag("live_only", live_only),
            check_progress(progress),
            check_if_shared(if_shared),
            time.monotonic() + check_timeout(timeout),
        )

    @property
    def asks_for_live(self) -> bool:
        """Whether the pause needs to know which bytes are live."""
        return self.live_only and self.backup != _core.BACKUP_NONE


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeOptions:
    """The checked options of a resume.

    Attributes:
        tags: The names; None is every tag.
        timeout: Seconds of all waiting of the call for memory, the devices' locks and other calls; 0 does not wait for
            memory and locks.
        deadline: The end of that time, in seconds of :func:`time.monotonic`; infinity if `timeout` is 0.
        exclusive: The devices' locks are taken.
        host_policy: The core's number for the policy for the backups' host memory.
        zero: Memory that is resumed without contents is zeroed.
        progress: Told of the copies.
        wait: The call returns when the memory may be accessed.
    """

    tags: tuple[str, ...] | None
    timeout: float
    exclusive: bool
    host_policy: int
    zero: bool
    progress: Progress | None
    wait: bool
    deadline: float = math.inf

    @classmethod
    def check(
        cls,
        tag: object,
        timeout: object,
        exclusive: object,
        host_memory: object,
        zero: object,
        progress: object,
        wait: object,
    ) -> ResumeOptions:
        """
        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.resume`, or ``progress`` without
                ``wait``.
        """
        seconds = check_timeout(timeout)
        options = cls(
            select_tags(tag),
            seconds,
            check_flag("exclusive", exclusive),
            choose_host_policy(host_memory),
            check_flag("zero", zero),
            check_progress(progress),
            check_flag("wait", wait),
            time.monotonic() + seconds if seconds else math.inf,
        )
        if options.progress is not None and not options.wait:
            raise InvalidArgumentError("progress needs a call that waits: it is called on the thread of that call")
        return options

    @property
    def may_wait_for_others(self) -> bool:
        """Whether the call may wait for memory or locks that others hold."""
        return self.timeout > 0 or self.exclusive

    @property
    def remaining(self) -> float:
        """The rest of the timeout, in seconds."""
        return max(0.0, self.deadline - time.monotonic()) if self.timeout else 0.0

    def at_once(self) -> ResumeOptions:
        """The same options without waiting for memory."""
        return dataclasses.replace(self, timeout=0.0)
