"""The CPython extension: the native core's function table, one Python function for each entry.

Nothing here imports torch. No GPU is used before a function that needs one is called. The GIL is released around every call
that may wait; calls for this thread's region and ``tag_info`` never wait. Failures of the native core are exceptions of
:mod:`torch_memory_saver.errors`. Arguments of a wrong type raise TypeError; numbers out of range, and tags that are empty or
contain a NUL, raise ValueError, before anything changes. Sizes are bytes, devices CUDA ordinals, addresses integers.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

_Tags = tuple[str, ...] | None  # None: every tag
_Live = tuple[bytes, bytes] | tuple[bytes, bytes, bytes]
_FindLive = Callable[[], _Live | None] | None
_TorchSegment = dict[str, Any]  # of torch's snapshot
_Pools = AbstractSet[tuple[int, int]]  # their ids
_Progress = Callable[[int, int], Any] | None
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

#: CRC-32 of this file at build time, compared by ``_interface`` and for a preload library. 0: the build did not pass it.
INTERFACE: Final[int]
#: 1: built with NVTX ranges; 0: the build found no headers of nvtx3.
NVTX: Final[int]

#: The kinds of backups: numbers by name. The module also has each as ``BACKUP_<NAME>``; those that Python code uses are
#: listed here.
BACKUP_KINDS: Final[Mapping[str, int]]
BACKUP_NONE: Final[int]
BACKUP_PINNED: Final[int]
BACKUP_MMAP: Final[int]
BACKUP_DISK: Final[int]
BACKUP_SHARED: Final[int]

#: The names of the core's environment variables.
SETTINGS: Final[tuple[str, ...]]
#: What other processes may request in the shared page: the names of the numbers 0, 1, ...
PAGE_REQUESTS: Final[tuple[str, ...]]
#: The policies for host memory after a resume; DEFAULT: the next wider setting applies.
HOST_DEFAULT: Final[int]
HOST_RELEASE: Final[int]
HOST_POOL: Final[int]
HOST_RETAIN: Final[int]

#: The options of pause and resume (csrc/include/tms_selection.h): name, kind, default as Python writes it, and whether the
#: functions below take the checked value.
PAUSE_OPTIONS: Final[tuple[tuple[str, str, str, bool], ...]]
RESUME_OPTIONS: Final[tuple[tuple[str, str, str, bool], ...]]

#: What guard mode shows in place of contents.
GUARD_BYTE: Final = 0xFF

#: The names of the states by their numbers.
STATE_NAMES: Final[tuple[str, ...]]
STATE_ACTIVE: Final[int]
STATE_PAUSING: Final[int]
STATE_PAUSED: Final[int]
STATE_RESUMING: Final[int]
STATE_DAMAGED: Final[int]
STATE_REPAIRING: Final[int]

#: Where the contents of an allocation are from: ``tms_contents_t`` of csrc/include/tms.h.
CONTENTS_OWN: Final[int]
CONTENTS_RESTORED: Final[int]
CONTENTS_ZEROED: Final[int]
CONTENTS_GUARD: Final[int]
CONTENTS_UNDEFINED: Final[int]

#: Path of the shared object that holds the process's state: the preload library if it is loaded, else this extension.
library_path: Final[str]
#: Whether the state lives in the preload library.
preloaded: Final[bool]
#: Whether this is the main interpreter, which ends with the process.
main_interpreter: Final[bool]
#: Whether the process runs with rights that its caller may lack, and ignores its TMS_* variables (csrc/base/config.h).
secure_execution: Final[bool]

class Pending:
    """A resume in the background."""

class Scope:
    """The base class of context managers that a signal handler cannot leave half-way: see ``csrc/python/scope.c``.

    A subclass defines ``_open()``, ``_enter(entry)``, ``_choose()``, ``_leave(entry)`` and ``_left(entry, exception)``."""

    def __enter__(self) -> Any: ...
    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

class HostBuffer:
    """Keeps a host backup's memory valid while it lives. Made by :func:`host_backup` only."""

    @property
    def address(self) -> int: ...

# Rows are struct sequences: tuples with named items. Only the functions below create them.

class Segment(NamedTuple):
    """The times are those of time.monotonic()."""

    address: int
    bytes: int
    reserved_bytes: int
    backup_bytes: int
    device: int
    state: int
    backup: int
    tag: str
    contents: int
    allocated_at: float
    changed_at: float

class Usage(NamedTuple):
    """The allocations of one tag (`device` is -1) or of one device (`tag` is None): see ``tms_usage_info_t``."""

    tag: str | None
    device: int
    allocations: int
    bytes: int
    resident_bytes: int
    paused_bytes: int
    damaged_bytes: int
    backup_bytes: int
    resident_peak_bytes: int
    slack_bytes: int
    deferred_bytes: int

class Export(NamedTuple):
    """A file descriptor of an allocation's physical memory. It stays the library's, until the allocation is paused or freed.
    `generation` is unique in this process for each piece of physical memory."""

    address: int
    bytes: int
    generation: int
    device: int
    descriptor: int

class Report(NamedTuple):
    """What a call did: see :class:`torch_memory_saver.reports.TransitionReport`."""

    allocations: int
    bytes: int
    copied_bytes: int
    unknown_tags: int
    seconds: float
    unchanged_bytes: int
    bytes_by_tag: dict[str, int]

class TagInfo(NamedTuple):
    """Counts of one tag.

    Attributes:
        paused: Allocations that are not active.
        epoch: Pauses that ever changed an allocation.
        discards: Times that a pause discarded contents of an allocation. It stays the same if all contents were kept.
    """

    paused: int
    epoch: int
    discards: int

class DeviceMemory(NamedTuple):
    free: int
    total: int

class DeviceInfo(NamedTuple):
    """What a device is: its UUID as NVML writes it, and its memory."""

    uuid: str
    total_bytes: int

class RegionSettings(NamedTuple):
    """The settings of a thread's innermost level; depth 0 is outside every region."""

    tag: str
    backup: int
    managed: bool
    depth: int
    runs: bool

class Event(NamedTuple):
    """One event: see ``tms_event_t`` in ``tms_events.h``."""

    kind: str
    phase: str
    operation: str
    began: int
    ended: int
    busy: int
    call: int
    thread: int
    device: int
    tag: str | None
    address: int
    allocations: int
    bytes: int
    copied_bytes: int
    unchanged_bytes: int
    total_bytes: int
    resident_change: int
    paused_change: int
    backup_change: int
    status: int
    status_name: str
    driver_result: int

class EventLevel(NamedTuple):
    """What allocations of one tag on one device hold after the last event."""

    tag: str
    device: int
    resident_bytes: int
    paused_bytes: int
    backup_bytes: int

class EventsCopy(NamedTuple):
    """The latest events from the oldest on. Levels with the same tag and device add up. `recorded`: events so far."""

    events: list[Event]
    levels: list[EventLevel]
    recorded: int
    capacity: int

class Library(NamedTuple):
    """Memory that is not managed, of one library on one device: see ``tms_library_info_t`` in ``tms_usage.h``."""

    path: str
    device: int
    bytes: int
    allocations: int

# Generated by `make stub` from csrc/include, checksum 0xde0a165f.

def allocate(size: int, device: int = -1) -> int:
    """Return the address of a managed allocation with the settings of this thread's region. -1 is the current device. Size 0
    gives 0."""

def free(address: int) -> bool:
    """Free a managed allocation in any state. Returns False if the address is not managed."""

def region_enter(
    tag: str, backup: int, managed: bool, host_policy: int = 0, runs: bool = True, follows: bool = False
) -> int:
    """Enter a region with these settings on this thread. Returns the id for :func:`region_leave`, never 0. `runs` False:
    each allocation has a physical handle of its own. `follows`: :func:`region_end_following` may end it."""

def region_leave(region: int) -> int:
    """Leave that region only; regions may be left in any order. Returns the number of regions that were entered later and
    stay in force, or -1 if this thread has already left the region or another thread is in it, where it then ends."""

def region_end_following(tag: str) -> None:
    """End the regions of the tag that follow another thread's, on all threads but this one. The settings outside of them
    apply from now on, and their threads still leave them."""

def region_current() -> RegionSettings:
    """Return the settings of this thread's innermost region. Depth 0 is outside every region."""

def region_set(tag: str, backup: int, managed: bool, host_policy: int = 0, runs: bool = True) -> None:
    """Change the settings of this thread's innermost region in place."""

def within(manager: Any, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function inside a context manager, such as a lock. Unlike a with statement, no signal handler can prevent the
    call of ``__exit__``, which gets no exception."""

def record_each(results: list[_Result], function: Callable[..., _Result], calls: Iterable[tuple[Any, ...]]) -> None:
    """Call a function of C code with each tuple of arguments, and append each result to a list. No signal handler runs
    between a call and its record."""

def move(source: list[_Item], target: list[_Item], index: int = -1) -> None:
    """Take one item out of a list, and append it to another one, with no signal handler in between."""

def pause(
    tags: _Tags,
    stream: int | None,
    interruptible: bool = False,
    backup: int | None = None,
    find_live: _FindLive = None,
    progress: _Progress = None,
    preserves: bool = False,
) -> Report:
    """Release physical memory. `stream`: the handle of the caller's current CUDA stream, queried for an active capture.
    `interruptible`: for the main thread; signal handlers run while the call waits, and one that raises ends it with nothing
    changed. `backup`: one of BACKUP_*, in place of the regions' choice.

    `find_live` is called once, after the devices have been synchronized, and returns the live bytes: addresses of
    allocations, and begins and ends of ranges inside them, both as sorted native 64-bit numbers in bytes. Allocations that
    it does not list are live as a whole, as are all if it returns None. `preserves`: it is called even if no region has a
    backup, and what it lists of allocations without one is kept in pinned host memory, unless `backup` is given.

    `progress` is called with (bytes done, total bytes) of the copies. An exception of either callback ends the call with
    nothing changed and is raised by it; once memory is being released, the call completes first. Neither may call pause or
    resume."""

def check_pause(
    tags: _Tags,
    stream: int | None,
    interruptible: bool = False,
    backup: int | None = None,
    find_live: _FindLive = None,
    progress: _Progress = None,
    preserves: bool = False,
) -> None:
    """Raise what :func:`pause` would raise before it copies, also if there is no room for its backups. The arguments are
    those of :func:`pause`; `progress` is not called. Waits for the devices, and changes nothing. Other processes may take
    the room before a pause uses it."""

def resume(
    tags: _Tags,
    stream: int | None,
    interruptible: bool = False,
    timeout: float = 0.0,
    exclusive: bool = False,
    host_memory: int = 0,
    zero: bool = False,
    progress: _Progress = None,
) -> Report:
    """Map physical memory again. `timeout`: seconds to wait for device memory and, if `exclusive`, for the devices' locks;
    infinity is for ever. `host_memory`: the policy for the backups that this call restores. `zero`: memory that is resumed
    without contents is zeroed. `progress`: as for :func:`pause`."""

def in_transition() -> bool:
    """Return whether this thread is inside a pause or resume: in a signal handler, a callback or a finaliser."""

def resume_begin(
    tags: _Tags,
    stream: int | None,
    interruptible: bool = False,
    timeout: float = 0.0,
    exclusive: bool = False,
    host_memory: int = 0,
    zero: bool = False,
    progress: _Progress = None,
) -> Pending:
    """Begin a resume on a background thread and return at once. The arguments are those of :func:`resume`; `interruptible`
    and `progress` are for its caller's wait, and have no effect here."""

def pending_done(pending: Pending) -> bool:
    """Return whether the resume has ended, successfully or not."""

def pending_await(pending: Pending, seconds: float, interruptible: bool = False) -> bool:
    """Wait for the end of the resume, successful or not, and leave the result to :func:`pending_wait`. Returns whether the
    end came within so many seconds."""

def pending_wait(pending: Pending, interruptible: bool = False) -> Report:
    """Wait for the end of the resume."""

def pending_wait_stream(pending: Pending, stream: int, interruptible: bool = False) -> None:
    """Make a stream wait for the copies of the resume. Returns once all copies are queued; work queued on the stream
    afterwards finds memory and contents."""

def count_guard_bytes(tags: _Tags, stream: int | None, ranges: bytes, interruptible: bool = False) -> list[int | None]:
    """Return for each range the number of its bytes that are GUARD_BYTE; None if the range does not lie in one selected
    allocation that is active. `ranges`: begins and ends, as sorted native 64-bit numbers, that do not overlap. Waits for the
    devices and copies the ranges to host memory."""

def read_backup(address: int, size: int, destination: int, stream: int | None, interruptible: bool = False) -> bool:
    """Copy ``size`` bytes at ``address``, which is paused, from a backup on disk to host memory at ``destination``. Returns
    False if no backup on disk holds the whole range. Waits for running pauses and resumes."""

def publish(pieces: bytes, name: str, contents: str, stream: int | None, interruptible: bool = False) -> int:
    """Keep pieces of device memory in the shared store under a name, and return the bytes that the store did not have.
    `pieces`: an address, a size and a device for each, as native 64-bit numbers. `contents`: a JSON value, for the manifest.
    Waits for running pauses and resumes, and for the devices."""

def adopt(pieces: bytes, names: str, stream: int | None, interruptible: bool = False) -> int | None:
    """Fill pieces of device memory, given as for :func:`publish`, with objects of the shared store. `names`: 32 digits for
    each. Returns None, or the index of the first object that does not exist, if there is one; then nothing is filled. Waits
    for running pauses and resumes, and for the devices."""

def host_backup(address: int, size: int) -> HostBuffer | None:
    """Return the host copy of ``size`` bytes at ``address``; None if there is none now. The program may write to it, so the
    next pause copies everything."""

def read_only_backup(address: int, size: int) -> HostBuffer | None:
    """Return the host copy of ``size`` bytes at ``address`` for reading; None if there is none now."""

def reserve_host_memory(size: int, device: int = -1) -> None:
    """Prepare `size` bytes of pinned host memory for backups of a device, in the background. -1 is the current device."""

def release_host_memory() -> None:
    """Release idle pooled host memory to the system, in the background."""

def set_host_policy(policy: int) -> None:
    """Set what happens to host memory after a resume if neither the call nor the region sets it: one of HOST_*."""

def get_host_policy() -> int:
    """Return the default policy for host memory after a resume."""

def set_retain_backup(retain: bool) -> None:
    """Set whether host backups are kept after a resume."""

def get_retain_backup() -> bool:
    """Return whether host backups are kept after a resume."""

def set_disk_directory(path: str) -> None:
    """Set the directory of new backup files, which is created if needed."""

def set_memory_margin(size: int) -> None:
    """Set the bytes of device memory that allocations must leave free."""

def get_memory_margin() -> int:
    """Return the bytes of device memory that allocations must leave free."""

def set_guard(on: bool) -> None:
    """Set guard mode, for the pauses and resumes that begin afterwards."""

def get_guard() -> bool:
    """Return whether pauses and resumes guard paused memory."""

def get_disabled() -> bool:
    """Return TMS_DISABLE, as it was when the core read it."""

def close() -> None:
    """End the library's use of the driver, at exit: no thread of the library calls it after this."""

def capture_begin(tag: str | None, backup: int, host_policy: int = 0, runs: bool = True) -> int:
    """Announce that a stream capture is about to begin. `tag` None: no settings for threads outside regions. Returns the
    identity of the capture."""

def capture_begin_on(stream: int) -> int:
    """Announce that a stream capture is about to begin on this CUstream, on this thread. It completes what this thread has
    announced and not begun yet. Returns the identity of the capture."""

def capture_begun(identity: int) -> None:
    """Report that the capture with that identity has begun. Its stream is not queried before that. 0: does nothing."""

def capture_end(identity: int = 0, unless_it_goes_on: bool = False) -> bool:
    """Report that the capture with that identity has ended or failed to begin; 0: the last one announced. Returns whether
    there was one, and True for 0. `unless_it_goes_on`: does nothing if its stream reports an active capture."""

def refresh_peers() -> None:
    """Grant the devices that this process has begun to use access to active allocations."""

def listen_devices(listener: Callable[[int], object] | None, mask: int) -> None:
    """Have ``listener(device)`` called on the main thread between two of its instructions, once for each device of the mask
    on which torch has allocated through the core. None: nothing is called any more."""

def device_count() -> int:
    """Return the number of CUDA devices."""

def active_devices() -> int:
    """Return a mask in which bit d is set where this process uses device d (its primary context is active)."""

def device_memory(device: int) -> DeviceMemory:
    """Return the free and the total bytes of a device."""

def device_info(device: int) -> DeviceInfo:
    """Return what a device is. Makes no context."""

def segments() -> list[Segment]:
    """Return every managed allocation, in order of allocation."""

def find(address: int, bytes: int = 1) -> Segment | None:
    """Return the first managed allocation that any of the `bytes` from `address` on lies in, or None."""

def usage(tag: str | None, device: int = -1) -> list[Usage]:
    """Return the allocations of a tag (None: all) on a device (-1: all): a row for each tag, then one for each device. The
    peaks are those of the whole tag or device."""

def reset_peaks() -> None:
    """Set every peak to what is mapped now."""

def export_memory(address: int) -> Export:
    """Export the physical memory of the allocation that `address` lies in, for other processes. NotManagedError: it lies in
    none. InvalidStateError: the memory is not resident, a pause or resume of it is under way, or no descriptor is free."""

def tag_info(tag: str) -> TagInfo:
    """Return how far a tag is paused."""

def tags() -> dict[str, bool]:
    """Return every tag that a region or an allocation has had, in order, and whether an allocation ever had it."""

def counters() -> dict[str, int]:
    """Return every counter by name."""

def libraries() -> list[Library]:
    """Return the memory that is not managed, by library and device. Preload mode only."""

def kept_allocations(tags: _Tags, every_backup: bool) -> bytes:
    """Return what a pause of the tags may keep: address, bytes and reserved bytes of each allocation, as sorted 64-bit
    numbers. `every_backup`: even of those without a backup of their own."""

def knows_blocks(segment: _TorchSegment, pools: _Pools, default_stream_only: bool) -> bool:
    """Return whether torch reports correctly which blocks of a segment are live. `pools`: those without captures.
    `default_stream_only`: there may be captures in them, but not on the legacy default stream."""

def live_ranges(segments: list[_TorchSegment], kept: bytes, pools: _Pools, default_stream_only: bool) -> _Live:
    """Return what `find_live` returns: of the allocations in `kept` those whose blocks torch knows, and the blocks not free,
    each as a range with the end of what was requested."""

def events() -> EventsCopy:
    """Return the latest events, and what is held after the last of them."""

def set_event_samples(on: bool) -> None:
    """Set whether the pauses and resumes that begin afterwards record the free memory of their devices."""

def write_log(level: int, text: str) -> None:
    """Write a line to stderr as the native log does, if TMS_LOG_LEVEL asks for lines of this level."""

def collect_log(function: Callable[[], _Result], lines: list[tuple[int, str]]) -> _Result:
    """Call ``function()``. Lines that the native log gets during the call, on whichever thread, are appended to `lines` as
    (level, text) instead of going to stderr, also if the call raises. Level 1 is error, 2 warning, 3 info, 4 debug."""

def set_page_role(name: str, rank: int, serves: bool) -> None:
    """Set what the shared page of this process says of it, also before the page is made. `rank` -1: unknown. `serves`:
    requests are served after each pause and resume."""

def page_requests() -> int:
    """Return a mask in which bit k is set if request k of PAGE_REQUESTS is made. 0 without a page. Reads a word for each."""

def page_serve(kind: int, served: bool, os_error: int = 0) -> None:
    """Report that request `kind` has been served, or that it has not: because of an errno, or of something else (0)."""

def page_path() -> str | None:
    """Return the path of the shared page of this process; None without one. The page is made at the first allocation."""

def page_directory() -> str:
    """Return the directory of shared pages, which may be missing."""

def read_page(descriptor: int) -> dict[str, Any]:
    """Return what the shared page in an open file says at one moment: `process`, `devices`, `rows`, `others`, and the words
    of requests, with the names of ``tms_shared_page.h``. ValueError: it is no page of this release. BlockingIOError: it was
    written to at every attempt, because its process may be stopped. OSError: it cannot be read."""

def request_page(descriptor: int, kind: int, withdraw: bool = False) -> None:
    """Make request `kind` in the shared page in a file that is open for writing, or withdraw it. OSError: it cannot be
    written, or is no page."""

def open_directory(path: str, mode: int = 0, exact: bool = False, own: str = "torch_memory_saver") -> tuple[int, str, str]:
    """Open the absolute path of a directory by the rule of ``private_directory.h``. Returns a descriptor, which serves as
    the directory of other calls only, the path, and why the directory is shared with other users ("" if it is not). `mode`:
    permissions of missing directories, which are made; 0: none is made. `exact`: a sticky directory of root, such as /tmp,
    is used itself, and not the directory `own`-<uid> in it. OSError, with its path: it cannot be used."""

def check_store_key(descriptor: int, path: str) -> None:
    """Read the key of the shared store in an open directory of this path, and keep nothing of it. BackupIOError: no process
    can use the key. A missing key is none."""
