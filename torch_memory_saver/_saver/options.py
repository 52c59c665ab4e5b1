"""What one call asks for that begins a region, pauses or resumes: a frozen object, checked once, that every layer below
passes on as it is. native.py makes the core's arguments of it.

The implementation's methods make it first of all. The saver hands them keywords, because an implementation may be one that a
program has registered: that is the contract of ``register_hook_mode``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.arguments import (
    check_progress,
    check_tag,
    check_tags,
    check_timeout,
    choose_backup,
    choose_host_policy,
    choose_pause_backup,
)
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["PauseOptions", "RegionOptions", "ResumeOptions"]

Progress = Callable[[int, int], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionOptions:
    """A checked region, of memory or of a graph: what allocations inside get.

    Attributes:
        tag: What pause and resume select by.
        backup: The core's number for where a pause puts contents.
        host_policy: The core's number for what becomes of the backups' host memory after a resume.
        managed: False: allocations inside are ordinary.
    """

    tag: str
    backup: int
    host_policy: int
    managed: bool

    @classmethod
    def check(
        cls,
        tag: object,
        enable_cpu_backup: object,
        enable_disk_backup: object,
        cpu_backup_backend: object,
        host_memory: object,
    ) -> RegionOptions:
        """
        Raises:
            InvalidArgumentError: One of them is not what :meth:`TorchMemorySaver.region` takes.
        """
        backup = choose_backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        return cls(check_tag(tag), backup, choose_host_policy(host_memory), managed=True)

    @classmethod
    def disabled(cls, tag: str) -> RegionOptions:
        """Those of disable() in a region of the tag."""
        return cls(tag, _core.BACKUP_NONE, _core.HOST_DEFAULT, managed=False)

    def unmanaged(self) -> RegionOptions:
        """The same for ordinary memory."""
        return dataclasses.replace(self, managed=False)


@dataclasses.dataclass(frozen=True, slots=True)
class PauseOptions:
    """A checked pause.

    Attributes:
        tags: None is every tag.
        backup: The core's number for where contents go this time; None is what the regions said.
        live_only: Free blocks are not copied.
        progress: Told of the copies.
    """

    tags: tuple[str, ...] | None
    backup: int | None
    live_only: bool
    progress: Progress | None

    @classmethod
    def check(cls, tag: object, backup: object, live_only: object, progress: object) -> PauseOptions:
        """
        Raises:
            InvalidArgumentError: One of them is not what :meth:`TorchMemorySaver.pause` takes.
        """
        return cls(check_tags(tag), choose_pause_backup(backup), bool(live_only), check_progress(progress))

    @property
    def asks_for_live(self) -> bool:
        """Whether it matters which bytes are live."""
        return self.live_only and self.backup != _core.BACKUP_NONE


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeOptions:
    """A checked resume.

    Attributes:
        tags: None is every tag.
        timeout: Seconds to wait for memory and for the devices' locks.
        exclusive: The devices' locks are taken.
        host_policy: The core's number for what becomes of the backups' host memory.
        zero: Memory that comes back without contents is zeroed.
        progress: Told of the copies.
        wait: The call returns when the memory may be touched.
    """

    tags: tuple[str, ...] | None
    timeout: float
    exclusive: bool
    host_policy: int
    zero: bool
    progress: Progress | None
    wait: bool

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
            InvalidArgumentError: One of them is not what :meth:`TorchMemorySaver.resume` takes, or ``progress`` without
                ``wait``.
        """
        options = cls(
            check_tags(tag),
            check_timeout(timeout),
            bool(exclusive),
            choose_host_policy(host_memory),
            bool(zero),
            check_progress(progress),
            bool(wait),
        )
        if options.progress is not None and not options.wait:
            raise InvalidArgumentError("progress needs a call that waits: it is told on the thread of the call")
        return options

    def at_once(self) -> ResumeOptions:
        """The same without waiting for memory."""
        return dataclasses.replace(self, timeout=0.0)
