"""The CPython extension: the native core's function table, one Python function an entry.

Nothing here imports torch or touches a GPU before a function that needs one is called. The GIL is released around every call
that may wait: not around those on this thread's region and ``tag_info``, which cannot. Failures of the native core are
exceptions of :mod:`torch_memory_saver.errors`; arguments of a wrong type are TypeError, numbers out of range and tags that
are empty or hold a NUL are ValueError, before anything changes. Sizes are bytes, devices CUDA ordinals, addresses integers.
"""

from typing import Final

BACKUP_NONE: Final[int]
BACKUP_PINNED: Final[int]
BACKUP_MMAP: Final[int]
BACKUP_DISK: Final[int]

STATE_ACTIVE: Final[int]
STATE_PAUSING: Final[int]
STATE_PAUSED: Final[int]
STATE_RESUMING: Final[int]
STATE_DAMAGED: Final[int]

#: Path of the shared object that holds the process's state: the preload library if it is loaded, else this extension.
library_path: Final[str]
#: Whether the state lives in the preload library.
preloaded: Final[bool]

class HostBuffer:
    """Keeps a host backup's memory valid while it lives. Made by :func:`host_backup` only."""

    @property
    def address(self) -> int: ...

#: (address, bytes, reserved_bytes, backup_bytes, device, state, backup, tag)
Segment = tuple[int, int, int, int, int, int, int, str]
#: (allocations, bytes, copied_bytes, unknown_tags, seconds)
Report = tuple[int, int, int, int, float]

def allocate(size: int, device: int = -1) -> int:
    """A managed allocation with the settings of this thread's region; -1 is the current device. Size 0 gives 0."""

def free(address: int) -> bool:
    """Frees a managed allocation in any state; False if the address is not managed."""

def region_push(tag: str, backup: int, managed: bool) -> int:
    """Enters a level of settings on this thread; returns the depth for :func:`region_pop`."""

def region_pop(depth: int) -> None: ...
def region_current() -> tuple[str, int, bool, int]:
    """(tag, backup, managed, depth) of this thread; depth 0 is outside every region."""

def region_set(tag: str, backup: int, managed: bool) -> None:
    """Changes this thread's innermost level in place."""

def pause(tags: tuple[str, ...] | None, stream: int | None, interruptible: bool = False) -> Report:
    """None is every tag; `stream` is the caller's current CUDA stream handle, asked whether it is capturing.

    `interruptible`, for the main thread: signal handlers run while the call waits, and one that raises ends it with nothing
    changed."""

def resume(
    tags: tuple[str, ...] | None,
    stream: int | None,
    interruptible: bool = False,
    timeout: float = 0.0,
    exclusive: bool = False,
) -> Report:
    """`timeout`: seconds to wait for device memory, and for the devices' locks where `exclusive`; infinity is for ever."""

def host_backup(address: int, size: int) -> HostBuffer | None:
    """The host copy of ``size`` bytes at ``address``; None where there is none now."""

def set_memory_margin(size: int) -> None: ...
def get_memory_margin() -> int: ...
def set_retain_backup(retain: bool) -> None: ...
def get_retain_backup() -> bool: ...
def set_disk_directory(path: str) -> None: ...
def capture_begin(tag: str | None, backup: int) -> None:
    """A stream capture is about to begin. `tag` None: no settings for threads outside regions."""

def capture_end() -> None: ...
def refresh_peers() -> None: ...
def device_count() -> int: ...
def active_devices() -> int:
    """Bit d is set where this process uses device d (its primary context is active)."""

def device_memory(device: int) -> tuple[int, int]:
    """(free, total) bytes."""

def segments() -> list[Segment]: ...
def find(address: int) -> Segment | None: ...
def tag_info(tag: str) -> tuple[int, int]:
    """(allocations of the tag that are not active, pauses that ever changed one of them)."""

def in_transition() -> bool:
    """Whether this thread is inside a pause or resume that waits: in a signal handler, or in a finaliser."""

def counters() -> dict[str, int]: ...
