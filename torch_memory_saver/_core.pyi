"""The CPython extension: the native core's function table, one Python function an entry.

Nothing here imports torch or touches a GPU before a function that needs one is called. The GIL is released around every call
that may wait: not around those on this thread's region and ``tag_info``, which cannot. Failures of the native core are
exceptions of :mod:`torch_memory_saver.errors`; arguments of a wrong type are TypeError, numbers out of range and tags that
are empty or hold a NUL are ValueError, before anything changes. Sizes are bytes, devices CUDA ordinals, addresses integers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

#: The version of the native core's function table: TMS_API_VERSION of csrc/include/tms.h.
API_VERSION: Final = 2
#: CRC-32 of the text of this file at the time of the build, which ``_interface`` compares. 0: built without setup.py.
INTERFACE: Final[int]

#: The kinds of backups: their numbers by their names. The module has each also as ``BACKUP_<NAME>``: here are those that
#: Python code names.
BACKUP_KINDS: Final[Mapping[str, int]]
BACKUP_NONE: Final[int]
BACKUP_PINNED: Final[int]
BACKUP_MMAP: Final[int]
BACKUP_DISK: Final[int]

#: What becomes of host memory after a resume; DEFAULT: what the next wider setting says.
SETTINGS: Final[tuple[str, ...]]
HOST_DEFAULT: Final[int]
HOST_RELEASE: Final[int]
HOST_POOL: Final[int]
HOST_RETAIN: Final[int]

STATE_ACTIVE: Final[int]
STATE_PAUSING: Final[int]
STATE_PAUSED: Final[int]
STATE_RESUMING: Final[int]
STATE_DAMAGED: Final[int]
STATE_REPAIRING: Final[int]

#: Path of the shared object that holds the process's state: the preload library if it is loaded, else this extension.
library_path: Final[str]
#: Whether the state lives in the preload library.
preloaded: Final[bool]
#: Whether this is the main interpreter, at whose end the process ends, and not a sub-interpreter.
main_interpreter: Final[bool]

class Pending:
    """A resume that goes on in the background."""

class HostBuffer:
    """Keeps a host backup's memory valid while it lives. Made by :func:`host_backup` only."""

    @property
    def address(self) -> int: ...

# Rows are struct sequences: tuples whose items have names as well. Only the functions below make them.

class Segment(NamedTuple):
    address: int
    bytes: int
    reserved_bytes: int
    backup_bytes: int
    device: int
    state: int
    backup: int
    tag: str

class Report(NamedTuple):
    """What a pause or resume did: see :class:`torch_memory_saver.TransitionReport`."""

    allocations: int
    bytes: int
    copied_bytes: int
    unknown_tags: int
    seconds: float

class TagInfo(NamedTuple):
    """Allocations of the tag that are not active, and pauses that ever changed one of them."""

    paused: int
    epoch: int

class DeviceMemory(NamedTuple):
    free: int
    total: int

class RegionSettings(NamedTuple):
    """Those of a thread's innermost level; depth 0 is outside every region."""

    tag: str
    backup: int
    managed: bool
    depth: int

def allocate(size: int, device: int = -1) -> int:
    """A managed allocation with the settings of this thread's region; -1 is the current device. Size 0 gives 0."""

def free(address: int) -> bool:
    """Frees a managed allocation in any state; False if the address is not managed."""

def region_push(tag: str, backup: int, managed: bool, host_policy: int = 0) -> int:
    """Enters a level of settings on this thread; returns the depth for :func:`region_pop`."""

def region_pop(depth: int) -> None: ...
def region_enter(tag: str, backup: int, managed: bool, host_policy: int = 0) -> int:
    """Enters a level of settings on this thread; returns the id for :func:`region_leave`, never 0."""

def region_leave(level: int) -> int:
    """Leaves that level and no other, in whatever order. How many levels entered after it stay in force; -1: it is none of
    this thread's, or has been left."""

def region_current() -> RegionSettings: ...
def region_set(tag: str, backup: int, managed: bool, host_policy: int = 0) -> None:
    """Changes this thread's innermost level in place."""

def pause(
    tags: tuple[str, ...] | None,
    stream: int | None,
    interruptible: bool = False,
    backup: int | None = None,
    find_live: Callable[[], tuple[bytes, bytes] | None] | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Report:
    """None is every tag; `stream` is the caller's current CUDA stream handle, asked whether it is capturing.

    `interruptible`, for the main thread: signal handlers run while the call waits, and one that raises ends it with nothing
    changed.

    `backup`: where contents go this time; BACKUP_NONE, BACKUP_DISK, or BACKUP_PINNED for host memory.

    `find_live` is called once, after the devices have been waited for, and says which bytes are live: addresses of
    allocations, and begins and ends of ranges inside them, both as sorted native 64-bit numbers in bytes. Of allocations
    that it does not name, and if it returns None, everything is.

    `progress` is called with (bytes done, bytes in all) of the copies. What either raises ends the call with nothing changed
    and is raised by it; once memory goes back, the call completes first. Neither may call pause or resume."""

def resume(
    tags: tuple[str, ...] | None,
    stream: int | None,
    interruptible: bool = False,
    timeout: float = 0.0,
    exclusive: bool = False,
    host_policy: int = 0,
    zero: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> Report:
    """`timeout`: seconds to wait for device memory, and for the devices' locks where `exclusive`; infinity is for ever.
    `host_policy`: for the backups of what this call resumes. `zero`: memory that comes back without contents is zeroed.
    `progress`: as for :func:`pause`."""

def resume_begin(
    tags: tuple[str, ...] | None,
    stream: int | None,
    timeout: float = 0.0,
    exclusive: bool = False,
    host_policy: int = 0,
    zero: bool = False,
) -> Pending:
    """Begins a resume on a thread of the library's and returns at once."""

def pending_done(pending: Pending) -> bool: ...
def pending_wait(pending: Pending, interruptible: bool = False) -> Report: ...
def pending_wait_stream(pending: Pending, stream: int, interruptible: bool = False) -> None:
    """Returns once all copies are queued; what is queued on the stream afterwards sees the contents."""

def host_backup(address: int, size: int) -> HostBuffer | None:
    """The host copy of ``size`` bytes at ``address``; None where there is none now."""

def set_memory_margin(size: int) -> None: ...
def get_memory_margin() -> int: ...
def set_retain_backup(retain: bool) -> None: ...
def get_retain_backup() -> bool: ...
def set_disk_directory(path: str) -> None: ...
def release_host_memory() -> None:
    """Gives idle pooled host memory back, in the background."""

def reserve_host_memory(size: int, device: int = -1) -> None:
    """Has `size` bytes of host memory made ready for backups of a device, in the background; -1 is the current device."""

def set_host_policy(policy: int) -> None:
    """What becomes of host memory after a resume where neither the call nor the region says: one of HOST_*."""

def get_host_policy() -> int: ...
def close() -> None:
    """At the program's exit: no thread of the library's own calls the driver after this."""

def capture_begin(tag: str | None, backup: int, host_policy: int = 0) -> int:
    """A stream capture is about to begin. `tag` None: no settings for threads outside regions. The result names it."""

def capture_begin_on(stream: int) -> int:
    """A stream capture is about to begin on this CUstream, on this thread: what the thread has announced, if it has."""

def capture_begun(identity: int) -> None:
    """The capture of that name has begun. Until then its stream is not asked whether it captures. 0: nothing."""

def capture_end(identity: int = 0, unless_it_goes_on: bool = False) -> bool:
    """The capture of that name has ended, or failed to begin; 0: the last one. Whether there was one. `unless_it_goes_on`:
    nothing, where its stream says that it captures."""

def refresh_peers() -> None: ...
def device_count() -> int: ...
def active_devices() -> int:
    """Bit d is set where this process uses device d (its primary context is active)."""

def device_memory(device: int) -> DeviceMemory: ...
def segments() -> list[Segment]: ...
def find(address: int) -> Segment | None: ...
def tag_info(tag: str) -> TagInfo: ...
def in_transition() -> bool:
    """Whether this thread is inside a pause or resume that waits: in a signal handler, or in a finaliser."""

def counters() -> dict[str, int]: ...
