"""Start the device process: a fork of this process right after the import of torch, when no other thread runs yet.

A forked child of the program does not inherit the device process. Its first operator starts a new one, which serves on a
thread of its own. The child may have computed on the CPU before: in the thread that forked, OpenMP would then wait for ever
for threads that the new process does not have.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import warnings

from torch_memory_saver._simulate.operators import native

__all__ = ["ensure_started"]

#: The process that has started the device process it uses.
_started_by = 0

_STANDARD_ERROR = 2


def ensure_started() -> None:
    """Start the device process unless this process has one. A forked child does not inherit its parent's."""
    global _started_by
    if _started_by != os.getpid():
        _start(late=_started_by != 0)
        _started_by = os.getpid()


def _start(late: bool) -> None:
    """Fork the device process and pass its socket to the simulated GPU.

    Args:
        late: Whether this is long after the import of torch.
    """
    ours, its = socket.socketpair()
    with warnings.catch_warnings():
        # Python 3.12 warns if threads exist. The existing ones belong to libraries that support fork, such as NumPy's.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child != 0:
        its.close()
        os.waitpid(child, 0)
        native.attach(ours.detach())
        return
    # The program's wait() would return a child. A grandchild is adopted by the system.
    try:
        if os.fork() == 0:
            _become_the_device_process(its, late)
    finally:
        os._exit(0)


def _become_the_device_process(connection: socket.socket, late: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C; this process exits after it
    gc.freeze()
    _close_others(connection.fileno())
    from torch_memory_saver._simulate.operators.device_process import serve

    if not late:
        serve(connection)
        return
    server = threading.Thread(target=serve, args=(connection,))
    server.start()
    server.join()


def _close_others(kept: int) -> None:
    """Close all inherited files except `kept` and standard error: another process may wait for end of file on them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        elif descriptor not in (_STANDARD_ERROR, kept):
            try:
                os.close(descriptor)
            except OSError:
                continue  # the descriptor of the listing itself, already closed
