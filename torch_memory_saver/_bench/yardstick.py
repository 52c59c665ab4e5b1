"""The driver calls of a pause and a resume in C loops (bare_driver.c), which are compiled on first use."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from .driver import DriverFailure, driver_name

__all__ = ["LARGE_HANDLE", "BareAllocations", "NoYardstick", "bare_allocations", "bare_large_handles", "open_driver"]

_SOURCE = Path(__file__).with_name("bare_driver.c")
_COMPILERS = ("gcc", "cc", "clang")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-w")
#: The most threads that prefault new host memory: as many as the library uses.
_MOST_THREADS = 15
#: Bytes. The driver's calls take little time for handles of this size; docs/performance.md has their times by size.
LARGE_HANDLE = 512 << 20


class NoYardstick(Exception):
    """The C loops cannot be compiled: there is no C compiler, or it failed."""


@functools.cache
def _load() -> ctypes.CDLL:
    """The functions of bare_driver.c, compiled by the compiler that CC names or else by the first one found.

    Raises:
        NoYardstick: There is no compiler, or it failed.
    """
    asked = shlex.split(os.environ.get("CC", ""))
    compiler = asked or [path for path in map(shutil.which, _COMPILERS) if path is not None][:1]
    if not compiler:
        raise NoYardstick(f"there is no C compiler: install one of {', '.join(_COMPILERS)}, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "bare_driver.so")
        try:
            done = subprocess.run(
                [*compiler, *_FLAGS, str(_SOURCE), "-o", str(library), "-ldl"], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise NoYardstick(f"the C compiler {compiler[0]} could not be started: {error.strerror}") from error
        if done.returncode != 0:
            raise NoYardstick(f"{compiler[0]} failed:\n{done.stderr.strip()}")
        loaded = ctypes.CDLL(str(library))
    size = ctypes.c_size_t
    words = ctypes.POINTER(ctypes.c_uint64)
    loaded.bare_open.argtypes = [ctypes.c_char_p, ctypes.c_int]
    loaded.bare_make.argtypes = [size, size, size]
    loaded.bare_pause_with_contents.argtypes = loaded.bare_resume_with_contents.argtypes = [ctypes.c_void_p]
    loaded.bare_host_memory.restype = ctypes.c_void_p
    loaded.bare_allocate_and_free.argtypes = [size, size, words, words]
    loaded.core_allocate.argtypes = [ctypes.c_void_p, size, size, words, words]
    loaded.core_free.argtypes = [ctypes.c_void_p, size, words, words]
    return loaded


def open_driver(ordinal: int) -> ctypes.CDLL:
    """The compiled functions, ready for use on a device. Makes the device's primary context current.

    Raises:
        NoYardstick: The functions cannot be compiled.
        DriverFailure: A driver call failed.
    """
    library = _load()
    result = library.bare_open(driver_name().encode(), ordinal)
    if result != 0:
        raise DriverFailure(f"bare_open of {driver_name()} failed with {result}")
    return library


class BareAllocations:
    """`count` address ranges of `size` bytes on a device, resumed and paused by the driver calls alone. They start paused.

    Args:
        last: The bytes of the last one. None: `size`.

    Raises:
        NoYardstick: The functions cannot be compiled.
        DriverFailure: A driver call failed.
    """

    def __init__(self, count: int, size: int, ordinal: int = 0, last: int | None = None) -> None:
        self._library = open_driver(ordinal)
        self._call("bare_make", count, size, size if last is None else last)

    def _call(self, name: str, *arguments: int) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise DriverFailure(f"{name} of bare_driver.c failed with {result}")

    def resume(self) -> None:
        self._call("bare_resume")

    def pause(self) -> None:
        self._call("bare_pause")

    def resume_with_contents(self, host: int) -> None:
        """Resumes, and copies from pinned memory at address `host`, which has as many bytes as all ranges together."""
        self._call("bare_resume_with_contents", host)

    def pause_with_contents(self, host: int) -> None:
        self._call("bare_pause_with_contents", host)

    def first_pause(self) -> int:
        """Pauses with copies to new host memory, which is kept until forget_host. Returns its address."""
        self._call("bare_first_pause", min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) - 1)))
        address: int = self._library.bare_host_memory()
        return address

    def forget_host(self) -> None:
        self._call("bare_forget_host")

    def close(self) -> None:
        """Frees the address ranges. They must be paused."""
        self._call("bare_unmake")


def bare_allocations(count: int, size: int, ordinal: int, last: int | None = None) -> tuple[BareAllocations | None, str]:
    """The ranges and ""; or None, and a note for rows without a limit, if the functions cannot be compiled.

    Raises:
        DriverFailure: A driver call failed.
    """
    try:
        return BareAllocations(count, size, ordinal, last), ""
    except NoYardstick as error:
        return None, f"no limit: {error}"


def bare_large_handles(total: int, ordinal: int) -> tuple[BareAllocations | None, str]:
    """The same for as few ranges as hold `total` bytes in handles of LARGE_HANDLE; the last one is the rest."""
    count = -(-total // LARGE_HANDLE)
    return bare_allocations(count, LARGE_HANDLE, ordinal, total - (count - 1) * LARGE_HANDLE)
