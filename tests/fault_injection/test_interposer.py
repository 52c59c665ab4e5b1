"""Guards the interposer: the calls that it sees, also if _FORTIFY_SOURCE has renamed them, or Python has its own address of
malloc; what it counts as resident; and the clock that goes forward while a test waits for threads."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

#: What compilers make of calls with a buffer whose size they know, or with flags that they do not know; and a call of
#: malloc, of which a Python that is not position-independent has its own address.
SOURCE = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROOM = 4096 };
static char room[ROOM];

ssize_t __read_chk(int fd, void *data, size_t bytes, size_t room);
ssize_t __pread_chk(int fd, void *data, size_t bytes, off_t offset, size_t room);
char *__getcwd_chk(char *path, size_t bytes, size_t room);
int __open_2(const char *path, int flags);
int __openat_2(int directory, const char *path, int flags);

/* The sum keeps the compiler from turning the call into a jump. */
static volatile long nothing;
long call_read(int fd) { return __read_chk(fd, room, ROOM, ROOM) + nothing; }
long call_pread(int fd) { return __pread_chk(fd, room, ROOM, 0, ROOM) + nothing; }
long call_getcwd(int fd) { return (void)fd, (__getcwd_chk(room, ROOM, ROOM) ? 0 : -1) + nothing; }
long call_open(int fd) { return (void)fd, __open_2("/dev/null", O_RDONLY) + nothing; }
long call_open_of_system(int fd) { return (void)fd, __open_2("/proc/self/stat", O_RDONLY) + nothing; }
long call_malloc(int fd) {
    void *volatile block = malloc((size_t)fd + 1);
    long made = block ? 0 : -1;
    free(block);
    return made + nothing;
}
long call_openat(int fd) { return (void)fd, __openat_2(AT_FDCWD, "/dev/null", O_RDONLY) + nothing; }
"""
CALLS = ["read", "pread", "getcwd", "open", "open_of_system", "openat", "malloc"]
COMPILE = ["-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-x", "c", "-"]

#: Of each call: whether it succeeds, what it returns when it is to fail, its error then, and how many have failed so far.
PROGRAM = """
import ctypes, errno, json, os, sys

interposer = ctypes.CDLL(None, use_errno=True)
library = ctypes.CDLL(sys.argv[1], use_errno=True)
interposer.tms_fault_fail_after.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
interposer.tms_fault_fired.restype = ctypes.c_uint64
assert interposer.tms_fault_watch(sys.argv[1].encode()) > 0
fd = os.open(sys.argv[1], os.O_RDONLY)
found = {}
for name in sys.argv[2:]:
    function = getattr(library, "call_" + name)
    function.restype = ctypes.c_long
    succeeds = function(fd) >= 0
    assert interposer.tms_fault_fail_after(name.encode(), 0, 1, errno.EIO) == 0
    failed = function(fd)
    found[name] = [succeeds, failed, ctypes.get_errno(), interposer.tms_fault_fired()]
print(json.dumps(found))
"""


#: Touches every page of a mapping of a file, and half of one without.
MAPPING_SOURCE = """
#include <sys/mman.h>
#include <string.h>

static char *map(long bytes, int flags, int fd) { return mmap(0, bytes, PROT_READ | PROT_WRITE, flags, fd, 0); }
long map_file(int fd, long bytes) {
    char *at = map(bytes, MAP_SHARED, fd);
    return at != MAP_FAILED && memset(at, 1, bytes) == at;
}
long map_memory(int fd, long bytes) {
    char *at = map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, fd);
    return at != MAP_FAILED && memset(at, 1, bytes / 2) == at;
}
"""

#: The mapped and the resident bytes after each mapping.
MAPPING_PROGRAM = """
import ctypes, json, sys, tempfile

BYTES = ctypes.c_long(int(sys.argv[2]))
interposer, library = ctypes.CDLL(None), ctypes.CDLL(sys.argv[1])
counts = [getattr(interposer, f"tms_fault_{name}_bytes") for name in ("mapped", "resident")]
for count in counts:
    count.restype = ctypes.c_uint64
assert interposer.tms_fault_watch(sys.argv[1].encode()) > 0
with tempfile.TemporaryFile() as file:
    file.truncate(BYTES.value)
    assert library.map_file(file.fileno(), BYTES)
    found = [[count() for count in counts]]
    assert library.map_memory(-1, BYTES)
    print(json.dumps([*found, [count() for count in counts]]))
"""


#: Starts a thread that waits for an hour.
WAITING_SOURCE = """
#include <pthread.h>
#include <time.h>

enum { HOUR = 3600 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t began = PTHREAD_COND_INITIALIZER;
static int waits;

static void *wait_for_an_hour(void *argument) {
    pthread_condattr_t attributes;
    pthread_cond_t condition;
    struct timespec end, now;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition, &attributes);
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += HOUR;
    pthread_mutex_lock(&lock);
    waits = 1;
    pthread_cond_signal(&began);
    do {
        pthread_cond_timedwait(&condition, &lock, &end);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < end.tv_sec);
    pthread_mutex_unlock(&lock);
    return argument;
}
long start(void) {
    pthread_t thread;
    if (pthread_create(&thread, 0, wait_for_an_hour, 0) || pthread_detach(thread)) return 1;
    pthread_mutex_lock(&lock);
    while (!waits) pthread_cond_wait(&began, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}
"""

#: The number of threads after a second, and after more than an hour, by the library's clock.
WAITING_PROGRAM = """
import ctypes, json, sys

interposer, library = ctypes.CDLL(None), ctypes.CDLL(sys.argv[1])
assert interposer.tms_fault_watch(sys.argv[1].encode()) > 0
assert library.start() == 0
found = [interposer.tms_fault_wait_for_threads(0)]
for second in range(3601):
    interposer.tms_fault_wait_for_threads(0)
print(json.dumps([*found, interposer.tms_fault_wait_for_threads(60)]))
"""


def run(interposer: Path, folder: Path, source: str, program: str, *arguments: str) -> object:
    """What a program prints about a library, both given as text, with the interposer preloaded."""
    library = folder / "library.so"
    compiler = shutil.which(os.environ.get("CC", "cc").split()[0]) or "gcc"
    subprocess.run([compiler, *COMPILE, "-o", str(library)], input=source, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", program, str(library), *arguments],
        env=os.environ | {"LD_PRELOAD": str(interposer)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_fortified_calls_fail_like_plain_ones(interposer: Path, tmp_path: Path) -> None:
    expected = {name: [True, -1, errno.EIO, count] for count, name in enumerate(CALLS, start=1)}
    assert run(interposer, tmp_path, SOURCE, PROGRAM, *CALLS) == expected


def test_pages_of_files_are_mapped_and_do_not_count_as_resident(interposer: Path, tmp_path: Path) -> None:
    """The system may evict them at any time."""
    size = 8 * os.sysconf("SC_PAGESIZE")
    assert run(interposer, tmp_path, MAPPING_SOURCE, MAPPING_PROGRAM, str(size)) == [[size, 0], [2 * size, size // 2]]


def test_waits_of_a_library_end_by_its_own_clock(interposer: Path, tmp_path: Path) -> None:
    assert run(interposer, tmp_path, WAITING_SOURCE, WAITING_PROGRAM) == [1, 0]
