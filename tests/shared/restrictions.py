"""Rights that a process gives up, for tests. The kernel then refuses it `pidfd_getfd`, by which a receiver gets a sender's
file descriptors.

system-call  a seccomp filter refuses the call, as that of a container without CAP_SYS_PTRACE does
effective    CAP_SYS_PTRACE is not in force, as in a process of an ordinary user
permitted    CAP_SYS_PTRACE is given up: the sender then has a capability that this process lacks
user         another user
"""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["impose", "refuse_pidfd_getfd"]

_CAP_SYS_PTRACE = 19
_PIDFD_GETFD = 438
_NOBODY = 65534

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class _Sets(ctypes.Structure):
    """32 capabilities."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def refuse_pidfd_getfd(number: int = errno.EPERM) -> None:
    """The call then fails with that error on this thread, and in the processes that it starts."""
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_WORD, 0, 0, 0),  # the call's number
        _Instruction(_JUMP_IF_EQUAL, 0, 1, _PIDFD_GETFD),
        _Instruction(_RETURN, 0, 0, _FAIL_WITH | number),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(instructions), instructions)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def _drop_capability(*, permitted: bool) -> None:
    """On this thread."""
    header, sets = _Header(_CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    _check(_libc.capget(ctypes.byref(header), sets))
    sets[0].effective &= ~(1 << _CAP_SYS_PTRACE)
    if permitted:
        sets[0].permitted &= ~(1 << _CAP_SYS_PTRACE)
    _check(_libc.capset(ctypes.byref(header), sets))


def impose(kind: str) -> None:
    """Gives up a right, for good."""
    if kind == "system-call":
        refuse_pidfd_getfd()
    elif kind == "user":
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    else:
        _drop_capability(permitted=kind == "permitted")
