"""Failures that may be hidden from the user, and why."""

from __future__ import annotations

#: Calls whose failure need not fail the user's call, and why. Every other failure is an exception that names it.
TOLERATED = {
    # What the driver or the system fails to release is quarantined.
    "cuMemHostUnregister": "the copies are done; the memory waits in the quarantine",
    "cuMemAddressFree": "the owner is done with it; the range waits in the quarantine",
    "cuStreamDestroy": "the copies are done; the stream waits in the quarantine",
    "cuEventDestroy": "the copies are done; the event waits in the quarantine",
    "munmap": "the owner is done with it; the mapping waits in the quarantine",
    "unlink": "the owner is done with it; the file waits in the quarantine",
    "unlinkat": "the owner is done with it; the file waits in the quarantine",
    # Calls that undo or end something whose result stands.
    "cuCtxPopCurrent": "the call has done its work; the context is put right by later calls",
    "cuDevicePrimaryCtxRelease": "the call has done its work; the reference goes with a later call",
    "close": "what was written has been checked; nothing is left open",
    # Optional calls without which everything works.
    "cuGetErrorName": "the message then has the number alone",
    "madvise": "a forked child then gets a lazy copy of the backup",
    "getrandom": "the clock's time names the file instead",
    "flock": "without it, the files of a killed process stay",
    "pthread_create": "the calling thread, or a later call, does it",
    "cuMemHostRegister": "ordinary memory serves as well, only slower",
    "cuThreadExchangeStreamCaptureMode": "only a capture under way would notice",
    "cuStreamGetCtx": "the stream is then not asked whether its capture goes on",
    "cuCtxGetId": "the stream is then not asked whether its capture goes on",
    "mincore": "the memory is then prefaulted page by page",
    "syscall": "memory of another node serves as well; files are written and read without io_uring",
    "sched_getaffinity": "the number of processors is asked for in another way",
    "open_of_system": "a limit that may not be read sets none, and without it there may be room enough",
    "read": "a limit that cannot be read sets none",
    "fopen": "a limit that cannot be read sets none; the node of a device is not known",
    "fdopendir": "cleaning up after dead processes is tried again by the next one",
    "openat": "cleaning up after dead processes is tried again by the next one",
    "fstat": "a file that cannot be looked at is left alone",
    "fstatat": "a file that cannot be looked at is left alone",
    "stat": "the directory is then made, which tells whether it can be used",
    "fcntl": "the search for a free number begins again at the first one",
    "getcwd": "a relative path stays relative",
}
