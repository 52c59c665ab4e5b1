"""The checked options of a call that begins a region, pauses or resumes.

The options are a frozen object, checked once, that every lower layer passes on unchanged. Each check names the argument, the
value and what is allowed. The options of a pause and a resume, with their defaults, are the rows of a table
(csrc/include/tms_selection.h), which the core exposes. This module has no names for options that only the core reads.

The engine's methods create the object first. The saver passes keywords to these methods, because the engine may be a
registered implementation: that is the contract of ``register_hook_mode``.

Every call that selects memory by tags takes patterns, as in ``pause("engine0/*")``: those of the shell, case-sensitive.
A region takes any name and no pattern. Once a region or an allocation has had a tag that looks like a pattern, the text
means that tag. A pattern stands for the tags that allocations have had when the call begins. The tags replace it once,
before anything else reads the selection, so all parts of a call select the same memory. A tag that appears afterwards is not
selected.

Any thread may call. There is no lock. A selection of names only is not looked up at all.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._text import warn_once
from torch_memory_saver.errors import InvalidArgumentError, rename_operation

__all__ = [
    "BACKUPS",
    "DEFAULT_TAG",
    "HOST_MEMORY",
    "PAUSE_TABLE",
    "RESUME_TABLE",
    "WILDCARDS",
    "PauseOptions",
    "RegionOptions",
    "ResumeOptions",
    "backend_checks",
    "backup_of_aliases",
    "check_bytes",
    "check_callback",
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
    "deferred_kind",
    "errors_of",
    "refuse_unrun",
    "select_tags",
]

DEFAULT_TAG = "default"

#: The public names of the kinds of backups, and what a pause can select instead of them.
BACKUPS = {
    "host": _core.BACKUP_PINNED,
    "mmap": _core.BACKUP_MMAP,
    "disk": _core.BACKUP_DISK,
    "shared": _core.BACKUP_SHARED,
}
_PAUSE_BACKUPS = {**BACKUPS, "discard": _core.BACKUP_NONE}
#: The C++ package's names of those in host memory.
_BACKENDS = {"pinned": "host", "mmap": "mmap"}
_IF_SHARED = ("allow", "wait", "refuse")
#: Additional checks of a backend: each is called with its name and may raise InvalidArgumentError.
backend_checks: list[Callable[[str], None]] = []
#: The core's numbers of the policies for host memory after a resume.
HOST_MEMORY = {"release": _core.HOST_RELEASE, "pool": _core.HOST_POOL, "retain": _core.HOST_RETAIN}


def _one_of(names: Iterable[str]) -> str:
    *rest, last = [f'"{name}"' for name in names]
    return f"{', '.join(rest)} or {last}"


def _is_tensor(tag: object) -> bool:
    """Return whether `tag` is a tensor of PyTorch, whose contents must not be read for a message: they may be paused."""
    return hasattr(type(tag), "__torch_function__")


def _parentheses(tag: object) -> str:
    """Return advice about a decorator without parentheses, which gets the function in place of a tag; "" for other tags."""
    return ". Write a decorator with parentheses: @region() or @on_pause()" if callable(tag) else ""


def check_tag(tag: object) -> str:
    """Return the tag if it is a valid one: a non-empty str that UTF-8 can encode, without NUL."""
    if _is_tensor(tag):
        raise InvalidArgumentError(
            f"a tag must be a str, not {type(tag).__name__}: memory is selected by tags. torch_memory_saver.tag_of(tensor) "
            "returns the tag of a tensor, which selects all memory of the tag"
        )
    if not isinstance(tag, str):
        raise InvalidArgumentError(f"a tag must be a str, not {type(tag).__name__}: {tag!r}{_parentheses(tag)}")
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
    """Return the tags of a pause or resume.

    None or "" is every tag, a str is one, and an iterable is several (without duplicates, in order).
    """
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
    if _is_tensor(tags):
        check_tag(tags)
    if isinstance(tags, (bytes, bytearray)) or not isinstance(tags, Iterable):
        raise InvalidArgumentError(
            f"tag must be None, a str or an iterable of str, not {type(tags).__name__}: memory gets a tag by region() or "
            f"manage(), and is selected by that tag{_parentheses(tags)}."
        )
    return tuple(dict.fromkeys(check_tag(tag) for tag in tags))


def choose_backup(backup: object) -> int:
    """Return the core's number for the backup of a region.

    None keeps no contents.
    """
    if backup is None:
        return _core.BACKUP_NONE
    if not isinstance(backup, str) or backup not in BACKUPS:
        raise InvalidArgumentError(f"backup must be None, {_one_of(BACKUPS)}, not {backup!r}{_meant(backup)}")
    return BACKUPS[backup]


def _meant(backup: object) -> str:
    return '; did you mean "host"?' if isinstance(backup, str) and backup == "cpu" else ""


def backup_of_aliases(enable_cpu_backup: object, enable_disk_backup: object, cpu_backup_backend: object) -> str | None:
    """Return the backup that the C++ package's three arguments of a region select."""
    if isinstance(enable_cpu_backup, str):
        advice = (
            f'pass the backup by name, as backup="{enable_cpu_backup}"'
            if enable_cpu_backup in BACKUPS
            else "a region has one tag, which is the first argument"
        )
        raise InvalidArgumentError(
            f"the second argument of a region is enable_cpu_backup, which must be True or False, not {enable_cpu_backup!r}: "
            + advice
        )
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
    """Return the core's number for the backup of a pause.

    None means that the backups of the regions apply.
    """
    if backup is None:
        return None
    if not isinstance(backup, str) or backup not in _PAUSE_BACKUPS:
        raise InvalidArgumentError(f"backup must be None, {_one_of(_PAUSE_BACKUPS)}, not {backup!r}{_meant(backup)}")
    return _PAUSE_BACKUPS[backup]


def choose_host_policy(host_memory: object) -> int:
    """Return the core's number for the policy for host memory after a resume.

    None means that the next wider setting applies.
    """
    if host_memory is None:
        return _core.HOST_DEFAULT
    if not isinstance(host_memory, str) or host_memory not in HOST_MEMORY:
        raise InvalidArgumentError(f'host_memory must be None, "release", "pool" or "retain", not {host_memory!r}')
    return HOST_MEMORY[host_memory]


def deferred_kind(function: object) -> str | None:
    """Return the kind of a callable whose body does not run during its call, or None for an ordinary one."""
    while isinstance(function, functools.partial):
        function = function.func
    for candidate in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(candidate):
            return "a coroutine function"
        if inspect.isasyncgenfunction(candidate):
            return "an asynchronous generator function"
        if inspect.isgeneratorfunction(candidate):
            return "a generator function"
    return None


def check_callback(name: str, callback: object) -> None:
    """Check that a callback is callable, and that its body runs when it is called."""
    if not callable(callback):
        raise InvalidArgumentError(f"{name} must be a callable, not {type(callback).__name__}: {callback!r}")
    kind = deferred_kind(callback)
    if kind is not None:
        raise InvalidArgumentError(
            f"{name} must be an ordinary function, not {kind} ({callback!r}): a call would not run its body"
        )


def refuse_unrun(name: str, result: type) -> None:
    """Refuse the type of a callable's result if it shows that the body has not run.

    Only a call shows it of a lambda or a decorated function.
    """
    if result in (CoroutineType, GeneratorType, AsyncGeneratorType):
        kind = result.__name__.replace("_", " ")
        raise InvalidArgumentError(f"{name} has returned a {kind}, whose body has not run: pass an ordinary function")


def check_progress(progress: object) -> Callable[[int, int], Any] | None:
    """Return None, or a function that calls `progress` and refuses a result that shows that no body has run."""
    if progress is None:
        return None
    if not callable(progress):
        raise InvalidArgumentError(
            f"progress must be None or a callable that takes (done_bytes, total_bytes), not {type(progress).__name__}"
        )
    check_callback("progress", progress)

    def report(done_bytes: int, total_bytes: int) -> None:
        refuse_unrun("progress", type(progress(done_bytes, total_bytes)))

    return report


def check_device(device: object) -> int:
    """Return the CUDA ordinal of `device`, an int or a torch.device.

    None and a torch.device without an ordinal give -1, the current device.
    """
    number = getattr(device, "index", None) if getattr(device, "type", None) == "cuda" else device
    if device is None or (number is None and device is not number):
        return -1
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgumentError(
            f"device must be None, an int or a CUDA torch.device, such as torch.device('cuda:0'), not {device!r}"
        )
    if not 0 <= number < 1 << 31:
        raise InvalidArgumentError(f"device must not be negative, nor beyond what there is, but is {number}")
    return number


def check_bytes(name: str, value: object) -> int:
    """Return a number of bytes, which must be an int from 0 to 2^63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} must be an int of bytes, such as 1 << 30, not {type(value).__name__}: {value!r}")
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
    """Return `value`, which must be True or False.

    Other values, such as "off", are an error.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")
    return value


def check_if_shared(if_shared: object) -> str:
    """Return `if_shared`, which must be the name of a policy of a pause for shared memory."""
    if not isinstance(if_shared, str) or if_shared not in _IF_SHARED:
        raise InvalidArgumentError(f"if_shared must be {_one_of(_IF_SHARED)}, not {if_shared!r}")
    return if_shared


def check_timeout(timeout: object) -> float:
    """Return the seconds to wait.

    None gives 0. Other values must be a number that is not negative; infinity waits forever.
    """
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


#: A tag with one of these characters that no region or allocation has had is a pattern.
WILDCARDS = frozenset("*?[")


def select_tags(tags: object) -> tuple[str, ...] | None:
    """Return the names of the tags that a call selects, each once, in order, or None for every tag.

    A pattern that matches no tag is returned unchanged, and the core warns about it as about an unknown tag.

    Raises:
        InvalidArgumentError: `tags` is neither a tag nor an iterable of tags.
    """
    selected = check_tags(tags)
    if selected is None or all(WILDCARDS.isdisjoint(tag) for tag in selected):
        return selected
    known = _core.tags()
    used = [tag for tag, is_used in known.items() if is_used]
    names: dict[str, None] = {}
    for tag in selected:
        is_pattern = not WILDCARDS.isdisjoint(tag) and tag not in known
        matches = [name for name in used if fnmatchcase(name, tag)] if is_pattern else []
        names.update(dict.fromkeys(matches or [tag]))
    return tuple(names)


@contextmanager
def errors_of(operation: str) -> Iterator[None]:
    """Name the operation in errors of its arguments, also at the beginning of the message."""
    try:
        yield
    except InvalidArgumentError as error:
        if not error.operation:
            rename_operation(error, operation)
        raise


class RegionOptions(NamedTuple):
    """The checked options of a region, of memory or of a graph, which apply to allocations inside.

    The fields are the arguments of ``_core.region_enter``.

    Attributes:
        tag: Name by which pause and resume select the allocations.
        backup: Kind of backup, as a number of the core.
        managed: Whether allocations inside are managed. If False, they are ordinary.
        host_policy: Policy for the backups' host memory after a resume, as a number of the core.
        runs: Whether allocations may share physical handles. If False, each allocation keeps a handle of its own.
    """

    tag: str
    backup: int
    managed: bool
    host_policy: int
    runs: bool = True

    def __str__(self) -> str:
        return f"region(tag={self.tag!r})" if self.managed else "disable()"

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
        threads: object = True,
        operation: str = "region",
    ) -> RegionOptions:
        """Check the arguments of a region and return its options. Errors name the operation. `threads` is only checked.

        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.region`.
        """
        with errors_of(operation):
            check_switch("threads", threads)
            alias = backup_of_aliases(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
            if backup is not None and alias is not None:
                raise InvalidArgumentError("backup replaces enable_cpu_backup and enable_disk_backup: pass backup alone")
            return cls(
                check_tag(tag),
                choose_backup(alias if backup is None else backup),
                True,
                choose_host_policy(host_memory),
                check_switch("runs", runs),
            )

    @classmethod
    def disabled(cls, tag: str) -> RegionOptions:
        """Return the options of disable() in a region of the tag."""
        return cls(tag, _core.BACKUP_NONE, managed=False, host_policy=_core.HOST_DEFAULT)

    def unmanaged(self) -> RegionOptions:
        """Return a copy of these options that makes allocations ordinary memory."""
        return self._replace(managed=False)


class _Option(NamedTuple):
    """A row of the table of options in csrc/include/tms_selection.h.

    Attributes:
        check: Returns the checked value, or raises InvalidArgumentError.
        default: Default of the public method.
        for_core: Whether the core gets the checked value. Its own default is that of the public method.
    """

    check: Callable[[Any], Any]
    default: Any
    for_core: bool


#: The check of a value, by the kind of its option. The check of a flag is absent: it also needs the name of the option.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "BACKUP": choose_pause_backup,
    "HOST_MEMORY": choose_host_policy,
    "IF_SHARED": check_if_shared,
    "PROGRESS": check_progress,
    "SECONDS": check_timeout,
}


class _Table:
    """The options of pause or of resume."""

    def __init__(self, rows: Iterable[tuple[str, str, str, bool]]) -> None:
        self.options = {
            name: _Option(
                functools.partial(check_flag, name) if kind == "FLAG" else _CHECKS[kind], ast.literal_eval(default), for_core
            )
            for name, kind, default, for_core in rows
        }
        self._own = {name: row.check(row.default) for name, row in self.options.items() if not row.for_core}

    def check(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of the options that only this package reads, and those of the core's that are not the default.

        Raises:
            InvalidArgumentError: A value is not valid.
            TypeError: There is no such option.
        """
        own, options = self._own.copy(), self.options
        core: dict[str, Any] = {}
        for name, value in given.items():
            if name not in options:
                raise TypeError(f"got an unexpected keyword argument {name!r}")
            check, default, for_core = options[name]
            if value is not default:
                (core if for_core else own)[name] = check(value)
        return own, core


PAUSE_TABLE = _Table(_core.PAUSE_OPTIONS)
RESUME_TABLE = _Table(_core.RESUME_OPTIONS)


class PauseOptions(NamedTuple):
    """The checked options of a pause.

    Attributes:
        tags: Names of the tags, or None for every tag.
        deadline: Time at which all waiting of the call ends, in seconds of :func:`time.monotonic`.
        core: Arguments of the core, by name, without those that have the default.
        live_only: True if free blocks are not copied.
        if_shared: Policy for memory that other processes may still use: "allow", "wait" or "refuse".
    """

    tags: tuple[str, ...] | None
    deadline: float
    core: Mapping[str, Any]
    live_only: bool
    if_shared: str

    @classmethod
    def check(cls, tag: object = None, **given: object) -> PauseOptions:
        """Check the arguments of a pause and return its options.

        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.pause`.
        """
        with errors_of("pause"):
            tags = select_tags(tag)
            own, core = PAUSE_TABLE.check(given)
        return cls(tags, time.monotonic() + own["timeout"], core, own["live_only"], own["if_shared"])

    @property
    def may_wait_for_others(self) -> bool:
        """Whether the call may wait for memory or locks that others hold. A pause needs none."""
        return False

    @property
    def backup(self) -> int | None:
        """Kind of backup, as a number of the core, or None for the backups of the regions."""
        return self.core.get("backup")

    @property
    def asks_for_live(self) -> bool:
        """Whether the pause needs to know which bytes are live."""
        return self.live_only and self.backup != _core.BACKUP_NONE


class ResumeOptions(NamedTuple):
    """The checked options of a resume.

    Attributes:
        tags: Names of the tags, or None for every tag.
        deadline: Time at which the timeout ends, in seconds of :func:`time.monotonic`; infinity if there is no timeout.
        core: Arguments of the core, by name, without those that have the default.
        wait: True if the call returns only when the memory may be accessed.
    """

    tags: tuple[str, ...] | None
    deadline: float
    core: Mapping[str, Any]
    wait: bool

    @classmethod
    def check(cls, tag: object = None, **given: object) -> ResumeOptions:
        """Check the arguments of a resume and return its options.

        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.resume`, or ``progress`` without
                ``wait``.
        """
        with errors_of("resume"):
            tags = select_tags(tag)
            own, core = RESUME_TABLE.check(given)
        seconds = core.get("timeout", 0.0)
        options = cls(tags, time.monotonic() + seconds if seconds else math.inf, core, own["wait"])
        if "progress" in core and not options.wait:
            raise InvalidArgumentError(
                "resume: progress needs a call that waits, because it is called on the calling thread: leave out wait=False",
                operation="resume",
            )
        return options

    @property
    def may_wait_for_others(self) -> bool:
        """Whether the call may wait for memory or locks that others hold."""
        return bool(self.core.get("timeout") or self.core.get("exclusive"))

    @property
    def core_now(self) -> Mapping[str, Any]:
        """Arguments of the core, with the remaining part of the timeout."""
        if not self.core.get("timeout"):
            return self.core
        return {**self.core, "timeout": max(0.0, self.deadline - time.monotonic())}

    def at_once(self) -> ResumeOptions:
        """Return a copy of these options that does not wait for memory."""
        return self._replace(core={**self.core, "timeout": 0.0})
