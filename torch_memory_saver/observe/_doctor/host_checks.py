"""Checks of the host: memory for backups, huge pages, locked memory, and the folders of backups. They need no GPU."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_memory_saver._folders import why_not_writable
from torch_memory_saver._shared_folder import VARIABLE, key_problem, opened_store, store_path
from torch_memory_saver._text import binary_size
from torch_memory_saver.observe._doctor.check import Check, Finding, driver_facts, fail, ok, skip, warn
from torch_memory_saver.observe._doctor.gpu_checks import network_cards

__all__ = ["CHECKS", "has_capability"]

#: Folder that contains /proc and /sys. Tests substitute another folder.
ROOT = Path("/")
_CAP_IPC_LOCK = 14
#: cgroups of version 1 write "no limit" as the largest number of whole pages.
_NO_LIMIT = 1 << 62
#: With less than this, a disk backup of one segment of a large model may fail.
_LITTLE_SPACE = 1 << 30
#: A smaller shared store has room for no model. Docker's /dev/shm has 64 MiB.
_SMALL_STORE = 1 << 30
#: With fewer free inodes, a pause soon fails: each object takes one, and its holders one each.
_FEW_INODES = 100
_IN_MEMORY = ("tmpfs", "ramfs")
_DEFAULT_DIRECTORY = "/tmp"


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def _meminfo() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes, by name. HugePages_Total is a count."""
    rows = re.findall(r"^(\w+):\s+(\d+)( kB)?", _read("proc/meminfo"), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in rows}


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. `shown`: which part of its file system is mounted."""

    shown: str
    point: str
    kind: str
    options: tuple[str, ...]


_UNKNOWN_MOUNT = Mount("", "", "unknown", ())


def _mounts() -> Iterator[Mount]:
    for line in _read("proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        first, last = before.split(), after.split()
        if separator and len(first) > 4 and len(last) > 2:
            shown, point = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in first[3:5])
            yield Mount(shown, point, last[0], tuple(last[2].split(",")))


class _GroupFiles(NamedTuple):
    """The files of a version of cgroups. `cache`: the number in `statistics` of page cache that the kernel drops when memory
    is needed. The core judges by the same files (csrc/backup/host/limit.c)."""

    limits: tuple[str, ...]
    usage: str
    cache: str
    statistics: str = "memory.stat"


_VERSION_1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


class _Group(NamedTuple):
    """A cgroup with a limit. Bytes; page cache that can be dropped is not used."""

    folder: str
    limit: int
    used: int


def _own_groups() -> Iterator[tuple[str, _GroupFiles]]:
    """Return the folders of this process's cgroups from its own up, with their files."""
    mounts = list(_mounts())
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files, own = _VERSION_2, [m for m in mounts if m.kind == "cgroup2"]
        elif "memory" in controllers.split(","):
            files, own = _VERSION_1, [m for m in mounts if m.kind == "cgroup" and "memory" in m.options]
        else:
            continue
        for mount in own[:1]:
            shown = mount.shown.rstrip("/")
            # In a container the path is often outside of what is mounted: then only the mount point counts.
            below = path[len(shown) :] if path == shown or path.startswith(shown + "/") else ""
            parts = [part for part in below.split("/") if part]
            for length in range(len(parts), -1, -1):
                yield "/".join([mount.point.strip("/"), *parts[:length]]), files


def _limited_groups() -> list[_Group]:
    groups = []
    for folder, files in _own_groups():
        for name in files.limits:
            try:
                limit, usage = _read(f"{folder}/{name}").strip(), int(_read(f"{folder}/{files.usage}"))
            except (OSError, ValueError):
                continue
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                groups.append(_Group(f"/{folder}", int(limit), max(usage - _droppable_cache(folder, files), 0)))
    return groups


def _droppable_cache(folder: str, files: _GroupFiles) -> int:
    try:
        match = re.search(rf"^{files.cache} (\d+)$", _read(f"{folder}/{files.statistics}"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def host_memory() -> Finding:
    available = _meminfo()["MemAvailable"]
    found = f"{binary_size(available)} available"
    try:
        groups = _limited_groups()
    except FileNotFoundError:
        groups = []
    if groups:
        tightest = min(groups, key=lambda group: group.limit - group.used)
        used, limit = binary_size(tightest.used), binary_size(tightest.limit)
        found += f"; the cgroup {tightest.folder} uses {used} of its limit of {limit}"
        available = min(available, max(tightest.limit - tightest.used, 0))
    else:
        found += ", no cgroup limits it"
    largest = max((device.total_bytes for device in driver_facts().devices), default=0)
    if available < largest:
        return warn(
            f"{found}: less than the memory of one GPU, {binary_size(largest)}",
            "raise the limit of the container, or keep backups on a disk or of fewer tags",
        )
    return ok(found)


def huge_pages() -> Finding:
    info = _meminfo()
    reserved = info.get("HugePages_Total", 0)
    lines = []
    if reserved:
        size = binary_size(reserved * info.get("Hugepagesize", 0))
        lines = [f"{reserved} huge pages ({size}) are reserved; backups use transparent ones, and cannot use these"]
    try:
        setting = re.search(r"\[(\w+)\]", _read("sys/kernel/mm/transparent_hugepage/enabled"))
    except FileNotFoundError:
        setting = None
    if setting is None:
        return skip("this kernel has no transparent huge pages", "nothing, unless pauses are slow in the first cycle", lines)
    found = f"transparent huge pages: {setting[1]}"
    if setting[1] == "never":
        return warn(
            f"{found}; preparing host memory for backups takes longer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            lines,
        )
    return ok(found, lines)


def has_capability(number: int) -> bool:
    """Return whether this process has a capability of Linux, such as 19 for CAP_SYS_PTRACE."""
    words = _read("proc/self/status").partition("CapEff:")[2].split()
    return bool(words) and bool(int(words[0], 16) >> number & 1)


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("a process may lock any amount of memory")
    found = f"a process may lock {binary_size(soft)}"
    if has_capability(_CAP_IPC_LOCK):
        return ok(f"{found}, and this one has CAP_IPC_LOCK, so that the limit is not for it")
    if network_cards():
        return warn(
            f"{found}; registering memory for RDMA fails beyond that",
            "raise the limit: ulimit -l unlimited, or --ulimit memlock=-1 for containers",
        )
    return ok(f"{found}; backups do not count, because the CUDA driver pins them")


def _mount_of(path: Path) -> Mount:
    """Return the mount in which an existing path lies."""
    real, found, longest = os.path.realpath(path), _UNKNOWN_MOUNT, -1
    for mount in _mounts():
        point = mount.point.rstrip("/")
        if (real == point or real.startswith(point + "/")) and len(point) >= longest:  # a later mount covers an earlier one
            found, longest = mount, len(point)
    return found


def disk_directory() -> Finding:
    variable = next((name for name in ("TMS_DISK_BACKUP_DIR", "TMPDIR") if os.environ.get(name)), None)
    # The core ignores a relative path, and logs about it.
    if variable is not None and not os.path.isabs(os.environ[variable]):
        variable = None
    path = Path(os.environ[variable] if variable else _DEFAULT_DIRECTORY)
    origin = f" ({variable})" if variable else ""
    choose = "set TMS_DISK_BACKUP_DIR to a folder on a disk that can be written to"
    if path.exists() and not path.is_dir():
        return fail(f"{path}{origin} is no folder", choose)
    # The core creates the folder, but not those above it.
    existing = path if path.exists() else path.parent
    if not existing.is_dir():
        return fail(f"{path}{origin} cannot be created, because there is no {existing}", choose)
    problem = why_not_writable(existing)
    if problem is not None:
        return fail(f"{existing}{origin} cannot be written to: {problem}", choose)
    space = os.statvfs(existing)
    free, kind = space.f_bavail * space.f_frsize, _mount_of(existing).kind
    found = f"{path}{origin} on {kind}, {binary_size(free)} free"
    if kind in _IN_MEMORY:
        return warn(f"{found}; it is memory, so disk backups there use host memory", choose)
    if free < _LITTLE_SPACE:
        return warn(f"{found}; disk backups need more", "free some space, or set TMS_DISK_BACKUP_DIR to another disk")
    return ok(found)


def shared_store() -> Finding:
    choose = f"set {VARIABLE} to a folder of this user on a tmpfs"
    origin = f" ({VARIABLE})" if os.environ.get(VARIABLE) else ""
    unusable = ""
    try:
        with opened_store(store_path()) as folder:
            path = existing = folder.path
            unusable = key_problem(folder)
    except FileNotFoundError as error:  # no process has used it yet
        path = Path(error.filename)
        existing = path.parent
    except OSError as error:
        return fail(f"{error.filename}{origin} is refused: {error.strerror}", choose)
    if unusable:
        return fail(unusable, choose)
    # The core creates the folder, but not those above it.
    if not existing.is_dir():
        return fail(f"{path}{origin} cannot be created, because there is no {existing}", choose)
    problem = why_not_writable(existing)
    if problem is not None:
        return fail(f"{existing}{origin} cannot be written to: {problem}", choose)
    mount, space = _mount_of(existing), os.statvfs(existing)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{path}{origin} on {mount.kind}"
    if mount.kind != "tmpfs":
        return warn(f'{found}; it is not memory, so pauses with backup="shared" fail', choose)
    # A tmpfs can be mounted without a limit.
    found += f", {binary_size(free)} of {binary_size(size)}" if size else ", any number of bytes"
    found += f" and {space.f_favail} of {space.f_files} inodes free" if space.f_files else " and any number of inodes free"
    if 0 < size < _SMALL_STORE:
        larger = f"start the container with a larger --shm-size, or set {VARIABLE} to a folder on a larger tmpfs"
        return warn(f"{found}; shared backups need more", larger, [_pages_of(mount)])
    if space.f_files and space.f_favail < _FEW_INODES:
        larger = f"mount the tmpfs with a larger nr_inodes, or set {VARIABLE} to a folder on another tmpfs"
        return warn(f"{found}; shared backups need more inodes", larger, [_pages_of(mount)])
    return ok(found, [_pages_of(mount)])


def _pages_of(mount: Mount) -> str:
    """Return which pages files have that are written and not mapped, as objects are."""
    option = next((text for text in mount.options if text.startswith("huge=")), "")
    try:
        setting = re.search(r"\[(\w+)\]", _read("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    except FileNotFoundError:
        setting = None
    system = setting[1] if setting else "deny"  # a kernel without huge pages
    reason = option or "no option huge="
    if system in ("deny", "force"):
        reason = f"shmem_enabled is {system}" if setting else "this kernel has no huge pages"
    if system == "force" or (system != "deny" and option in ("huge=always", "huge=within_size")):
        return f"huge pages ({reason})"
    return f"pages of {binary_size(os.sysconf('SC_PAGE_SIZE'))} ({reason})"


CHECKS = (
    Check("host memory", host_memory),
    Check("huge pages", huge_pages),
    Check("locked memory", locked_memory),
    Check("disk directory", disk_directory),
    Check("shared store", shared_store),
)
