"""Starts the device process: a fork of this one, made when torch has just been imported and no other thread runs yet.

Forked children of the program have none; they get one of their own at their first operator.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import warnings

from torch_memory_saver._simulate.operators import native

__all__ = ["start"]

_STANDARD_ERROR = 2


def start() -> None:
    """Forks the device process and connects the simulated GPU with it."""
    ours, its = socket.socketpair()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. Those that are there belong to libraries that can be forked: NumPy's.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child != 0:
        its.close()
        os.waitpid(child, 0)
        native.attach(ours.detach())
        return
    # A child of the program's would be found by its wait(); a grandchild is the system's.
    try:
        if os.fork() == 0:
            _become_the_device_process(its)
    finally:
        os._exit(0)


def _become_the_device_process(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's; this process ends with it
    gc.freeze()
    _close_others(connection.fileno())
    from torch_memory_saver._simulate.operators.device_process import serve

    serve(connection)


def _close_others(kept: int) -> None:
    """Other processes may wait for the end of files that the program has open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        elif descriptor not in (_STANDARD_ERROR, kept):
            try:
                os.close(descriptor)
            except OSError:
                continue  # that of the folder is closed already
