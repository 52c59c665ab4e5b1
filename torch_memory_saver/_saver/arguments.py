"""Checks of the arguments that users pass. Each names the argument, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._once import warn_once
from torch_memory_saver.errors import InvalidArgumentError

__all__ = [
    "DEFAULT_TAG",
    "HOST_MEMORY",
    "PAUSE_TIMEOUT_S",
    "backend_checks",
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
]

DEFAULT_TAG = "default"

#: The public names of the kinds of backups: those of `cpu_backup_backend`, and those that a pause can select.
_BACKENDS = {name: _core.BACKUP_KINDS[name] for name in ("pinned", "mmap")}
_PAUSE_BACKUPS = {
    name: _core.BACKUP_KINDS[kind] for name, kind in (("host", "pinned"), ("disk", "disk"), ("discard", "none"))
}
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


def choose_backup(enable_cpu_backup: object, enable_disk_backup: object, cpu_backup_backend: object) -> int:
    """The core's number for the backup that a region's three arguments select."""
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
        return _core.BACKUP_DISK
    return _core.BACKUP_PINNED if enable_cpu_backup else _core.BACKUP_NONE


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
