"""The options of a call that begins a region, pauses or resumes: a frozen object, checked once, that every lower layer
passes on unchanged. Each check names the argument, the value and what is allowed.

The engine's methods create it first. The saver passes them keywords, because the engine may be a registered
implementation: that is the contract of ``register_hook_mode``.

Every call that selects memory by tags takes patterns, as in ``pause("engine0/*")``: those of the shell, with upper and
lower case told apart. A region takes names only, and any name. A tag that looks like a pattern is meant by that name, as
soon as a region or an allocation has had it. A pattern stands for the tags that allocations have had when the call
begins. It is replaced by them once, before anything else looks at the selection, so that all parts of a call select the
same memory. A tag that appears afterwards is not selected, as an allocation that appears during a pause by name is not.

Any thread; no lock. A selection of names only is not looked up at all.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import warn_once
from torch_memory_saver.errors import InvalidArgumentError

__all__ = [
    "BACKUPS",
    "DEFAULT_TAG",
    "HOST_MEMORY",
    "PAUSE_TIMEOUT_S",
    "PauseOptions",
    "RegionOptions",
    "ResumeOptions",
    "backend_checks",
    "backup_of_aliases",
    "check_bytes",
    "check_device",
    "check_flag",
    "check_if_shared",
    "check_progress",
    "check_switch",
    "check_tag",
    "check_tags",
    "check_timeout",
    "choose_backup",
    "choose_host_policy",
    "choose_pause_backup",
    "select_tags",
]

DEFAULT_TAG = "default"

#: The public names of the kinds of backups, and what a pause can select instead of them.
BACKUPS = {"host": _core.BACKUP_PINNED, "mmap": _core.BACKUP_MMAP, "disk": _core.BACKUP_DISK}
_PAUSE_BACKUPS = {**BACKUPS, "discard": _core.BACKUP_NONE}
#: The C++ package's names of those in host memory.
_BACKENDS = {"pinned": "host", "mmap": "mmap"}
#: The default timeout of a pause, in seconds.
PAUSE_TIMEOUT_S = 10.0
_IF_SHARED = ("allow", "wait", "refuse")
#: Additional checks of a backend: each is called with its name and may raise InvalidArgumentError.
backend_checks: list[Callable[[str], None]] = []
#: The core's numbers of the policies for host memory after a resume.
HOST_MEMORY = {"release": _core.HOST_RELEASE, "pool": _core.HOST_POOL, "retain": _core.HOST_RETAIN}


def _one_of(names: Iterable[str]) -> str:
    *rest, last = [f'"{name}"' for name in names]
    return f"{', '.join(rest)} or {last}"


def check_tag(tag: object) -> str:
    """The tag, if it is a valid one: a non-empty str that UTF-8 can encode, without NUL."""
    if not isinstance(tag, str):
        raise InvalidArgumentError(f"a tag must be a str, not {type(tag).__name__}: {tag!r}")
    if not tag:
        raise InvalidArgumentError("a tag must not be empty")
    if "\0" in tag:
        raise InvalidArgumentError(f"a tag must not contain a null character: {tag!r}")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a tag must be text that UTF-8 can encode: {tag!r}") from error
    return tag


def check_tags(tags: object) -> tuple[str, ...] | None:
    """The tags of a pause or resume: None or "" is every tag, a str is one, an iterable is several (without duplicates, in
    order)."""
    if tags is None:
        return None
    if isinstance(tags, str):
        if not tags:
            warn_once(
                "empty tag",
                'tag is "", which selects every tag, as in the C++ package. Pass None to select every tag, or the name of a '
                "tag.",
            )
            return None
        return (check_tag(tags),)
    if isinstance(tags, (bytes, bytearray)) or not isinstance(tags, Iterable):
        raise InvalidArgumentError(f"tag must be None, a str or an iterable of str, not {type(tags).__name__}: {tags!r}")
    return tuple(dict.fromkeys(check_tag(tag) for tag in tags))


def choose_backup(backup: object) -> int:
    """The core's number for the backup of a region; None keeps nothing."""
    if backup is None:
        return _core.BACKUP_NONE
    if not isinstance(backup, str) or backup not in BACKUPS:
        raise InvalidArgumentError(f"backup must be None, {_one_of(BACKUPS)}, not {backup!r}")
    return BACKUPS[backup]


def backup_of_aliases(enable_cpu_backup: object, enable_disk_backup: object, cpu_backup_backend: object) -> str | None:
    """The backup that the C++ package's three arguments of a region select."""
    enable_cpu_backup = check_flag("enable_cpu_backup", enable_cpu_backup, none=True)
    enable_disk_backup = check_flag("enable_disk_backup", enable_disk_backup, none=True)
    if enable_cpu_backup and enable_disk_backup:
        raise InvalidArgumentError("enable_cpu_backup and enable_disk_backup exclude each other: choose one")
    if cpu_backup_backend is not None:
        if not isinstance(cpu_backup_backend, str) or cpu_backup_backend not in _BACKENDS:
            raise InvalidArgumentError(f"cpu_backup_backend must be {_one_of(_BACKENDS)}, not {cpu_backup_backend!r}")
        if not enable_cpu_backup:
            raise InvalidArgumentError("cpu_backup_backend requires enable_cpu_backup=True")
        for check in backend_checks:
            check(cpu_backup_backend)
        return _BACKENDS[cpu_backup_backend]
    if enable_disk_backup:
        return "disk"
    return "host" if enable_cpu_backup else None


def choose_pause_backup(backup: object) -> int | None:
    """The core's number for the backup of a pause; None: the backups of the regions."""
    if backup is None:
        return None
    if not isinstance(backup, str) or backup not in _PAUSE_BACKUPS:
        raise InvalidArgumentError(f"backup must be None, {_one_of(_PAUSE_BACKUPS)}, not {backup!r}")
    return _PAUSE_BACKUPS[backup]


def choose_host_policy(host_memory: object) -> int:
    """The core's number for the policy for host memory after a resume; None: the next wider setting applies."""
    if host_memory is None:
        return _core.HOST_DEFAULT
    if not isinstance(host_memory, str) or host_memory not in HOST_MEMORY:
        raise InvalidArgumentError(f'host_memory must be None, "release", "pool" or "retain", not {host_memory!r}')
    return HOST_MEMORY[host_memory]


def check_progress(progress: object) -> Callable[[int, int], Any] | None:
    """None or a callable."""
    if progress is not None and not callable(progress):
        raise InvalidArgumentError(
            f"progress must be None or a callable that takes (done_bytes, total_bytes), not {type(progress).__name__}"
        )
    return progress


def check_device(device: object) -> int:
    """A CUDA ordinal, or a torch.device that has one; None is -1, the current device."""
    number = getattr(device, "index", None) if getattr(device, "type", None) == "cuda" else device
    if device is None or (number is None and device is not number):
        return -1
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgumentError(f"device must be None, an int or a CUDA torch.device, not {device!r}")
    if not 0 <= number < 1 << 31:
        raise InvalidArgumentError(f"device must not be negative, nor beyond what there is, but is {number}")
    return number


def check_bytes(name: str, value: object) -> int:
    """A number of bytes: an int from 0 to 2^63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} must be an int number of bytes, not {type(value).__name__}: {value!r}")
    if not 0 <= value < 1 << 63:
        raise InvalidArgumentError(f"{name} must be between 0 and 2^63 - 1 bytes, not {value}")
    return value


def check_flag(name: str, value: object, *, none: bool = False) -> bool:
    """Return a flag as a bool: it is True, False, 1 or 0, and with `none` also None, which is False.

    Anything else is an error, because a str such as "no" or "disk" would count as True.
    """
    if none and value is None:
        return False
    if not isinstance(value, int) or value not in (0, 1):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def check_switch(name: str, value: object) -> bool:
    """True or False, and nothing else: "off" is not False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")
    return value


def check_if_shared(if_shared: object) -> str:
    """What a pause does about shared memory."""
    if not isinstance(if_shared, str) or if_shared not in _IF_SHARED:
        raise InvalidArgumentError(f"if_shared must be {_one_of(_IF_SHARED)}, not {if_shared!r}")
    return if_shared


def check_timeout(timeout: object) -> float:
    """Seconds to wait: None is 0, otherwise a number that is not negative; infinity is for ever."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidArgumentError(f"timeout must be None or a number of seconds, not {type(timeout).__name__}: {timeout!r}")
    if not timeout >= 0:
        raise InvalidArgumentError(f"timeout must not be negative or NaN, but is {timeout!r}")
    try:
        return float(timeout)
    except OverflowError:  # An int that is too large for a float.
        return math.inf


_WILDCARDS = frozenset("*?[")


def select_tags(tags: object) -> tuple[str, ...] | None:
    """The names of the tags that a call selects, each once, in order; None is every tag. A pattern that no tag matches
    stays as it is: the core warns of it as of an unknown tag.

    Raises:
        InvalidArgumentError: Neither a tag nor an iterable of tags.
    """
    selected = check_tags(tags)
    if selected is None or all(_WILDCARDS.isdisjoint(tag) for tag in selected):
        return selected
    known = _core.tags()
    used = [tag for tag, is_used in known.items() if is_used]
    names: dict[str, None] = {}
    for tag in selected:
        is_pattern = not _WILDCARDS.isdisjoint(tag) and tag not in known
        matches = [name for name in used if fnmatchcase(name, tag)] if is_pattern else []
        names.update(dict.fromkeys(matches or [tag]))
    return tuple(names)


Progress = Callable[[int, int], Any]


class RegionOptions(NamedTuple):
    """The checked options of a region, of memory or of a graph, which apply to allocations inside. They are the arguments of
    ``_core.region_enter``.

    Attributes:
        tag: The name by which pause and resume select.
        backup: The core's number for the kind of backup.
        managed: False: allocations inside are ordinary.
        host_policy: The core's number for the policy for the backups' host memory after a resume.
        runs: False: each allocation keeps a physical handle of its own.
    """

    tag: str
    backup: int
    managed: bool
    host_policy: int
    runs: bool = True

    @classmethod
    def check(
        cls,
        tag: object,
        backup: object = None,
        host_memory: object = None,
        runs: object = True,
        enable_cpu_backup: object = False,
        enable_disk_backup: object = False,
        cpu_backup_backend: object = None,
    ) -> RegionOptions:
        """
        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.region`.
        """
        alias = backup_of_aliases(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        if backup is not None and alias is not None:
            raise InvalidArgumentError("backup says what enable_cpu_backup and enable_disk_backup say: pass backup alone")
        return cls(
            check_tag(tag),
            choose_backup(alias if backup is None else backup),
            True,
            choose_host_policy(host_memory),
            check_switch("runs", runs),
        )

    @classmethod
    def disabled(cls, tag: str) -> RegionOptions:
        """The options of disable() in a region of the tag."""
        return cls(tag, _core.BACKUP_NONE, managed=False, host_policy=_core.HOST_DEFAULT)

    def unmanaged(self) -> RegionOptions:
        """The same for ordinary memory."""
        return self._replace(managed=False)


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
