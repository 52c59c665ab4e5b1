"""Checks of the requirements for sending tensors to other processes.

A receiver duplicates the sender's file descriptor by `pidfd_getfd`, for which the kernel asks for the right to trace the
sender. See "The right to receive" in docs/guides/several-gpus-and-processes.md.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_memory_saver.observe._doctor.check import Check, Finding, fail, ok, warn
from torch_memory_saver.observe._doctor.host_checks import has_capability

__all__ = ["CHECKS"]

#: Waits until its input ends. Its descriptor 0 is what the receiver duplicates.
_SENDER = "import sys; sys.stdin.read()"
#: Prints the number of the error, or 0. pidfd_open and pidfd_getfd have these numbers on every architecture.
_RECEIVER = """
import ctypes, sys
call = ctypes.CDLL(None, use_errno=True).syscall
process = call(434, int(sys.argv[1]), 0)
duplicated = call(438, process, 0, 0) if process >= 0 else -1
print(ctypes.get_errno() if duplicated < 0 else 0)
"""
_TRIAL_SECONDS = 60
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19
#: Systems set this limit for programs that use few files.
_FEW_FILES = 1024
_SHARED_MEMORY = Path("/dev/shm")
#: Size of a file of PyTorch's counters: a header and 10 000 counters of 64 bits.
_COUNTERS_BYTES = 64 + 10_000 * 8


def _try_to_duplicate() -> int | None:
    """Try to duplicate a file descriptor between two processes of which neither is the other's parent. Return the number of
    the error, 0 if it works, or None if the result is unknown."""
    python = [sys.executable, "-I", "-S", "-c"]
    try:
        with subprocess.Popen([*python, _SENDER], stdin=subprocess.PIPE) as sender:
            receiver = subprocess.run(
                [*python, _RECEIVER, str(sender.pid)], capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=True
            )
        return int(receiver.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def descriptors_of_siblings() -> Finding:
    number = _try_to_duplicate()
    if number == 0:
        return ok("a process can duplicate the descriptors of another process of this user")
    if number is None:
        return warn(
            f"the trial could not be made: two processes of {sys.executable} did not start",
            "run the doctor where processes can be started",
        )
    if number == errno.EPERM:
        return fail(
            "the kernel denies a process the descriptors of another process of this user (permission denied)",
            "start containers with --cap-add=SYS_PTRACE; outside of one, set kernel.yama.ptrace_scope to 0",
        )
    if number == errno.ENOSYS:
        return fail(
            "this kernel, or the sandbox around it, has no pidfd_getfd (not implemented)",
            "use Linux 5.6 or later, or send tensor.cpu()",
        )
    return fail(f"the call fails: {os.strerror(number)}", "send tensor.cpu()")


def ptrace_scope() -> Finding:
    try:
        value = int(_PTRACE_SCOPE.read_text(encoding="ascii"))
    except FileNotFoundError:
        return ok("this kernel has no kernel.yama.ptrace_scope, so it restricts nothing")
    except (OSError, ValueError) as error:
        return warn(f"kernel.yama.ptrace_scope cannot be read: {error}", "see pidfd_getfd above")
    if value == 0:
        return ok("kernel.yama.ptrace_scope is 0: processes of one user may receive of each other")
    if value >= 3:
        return fail(
            f"kernel.yama.ptrace_scope is {value}: no process may receive",
            "set it to 0 at the next start of the machine, because it cannot be lowered before",
        )
    if has_capability(_CAP_SYS_PTRACE):
        return ok(f"kernel.yama.ptrace_scope is {value}, and this process has CAP_SYS_PTRACE")
    found = f"kernel.yama.ptrace_scope is {value}: a receiver needs CAP_SYS_PTRACE"
    if value == 2:
        return warn(found, "set it to 0, or give receivers the capability")
    return warn(
        f"{found}, or to be an ancestor of the sender",
        "set it to 0, or call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) in senders",
    )


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("a process may open any number of files")
    if soft > _FEW_FILES:
        return ok(f"a process may open {soft} files")
    return warn(
        f"a process may open {soft} files, and half of them are for the allocations that it sends, one each",
        f"raise the limit by ulimit -n {hard if _FEW_FILES < hard < 1 << 16 else 1 << 16} before programs start",
    )


def shared_memory() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, _COUNTERS_BYTES)
    except OSError as error:
        return fail(
            f"PyTorch cannot count the receivers of a tensor there: {error.strerror}",
            "mount a writable tmpfs on /dev/shm (containers: --shm-size=1g, or --ipc=host)",
        )
    return ok("PyTorch can count the receivers of a tensor there")


CHECKS = (
    Check("pidfd_getfd", descriptors_of_siblings),
    Check("ptrace_scope", ptrace_scope),
    Check("open files", open_files),
    Check("/dev/shm", shared_memory),
)
