"""Two unprivileged users, as whom functions run in child processes, and a folder that belongs to root."""

from __future__ import annotations

import encodings.ascii  # noqa: F401  # codecs are imported at their first use
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ATTACKER", "USER", "as_user", "become", "folder_of"]

#: The uids, which need no name.
USER, ATTACKER = 20071, 20072
_SECONDS = 60


def become(uid: int) -> None:
    """Give this process the rights of a user, for ever."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o022)


def as_user(uid: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a child process with the rights of a user. The child fails the test if it raises, or
    if a signal ends it. The function must not import what the test has not imported: the user may not read it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        os.close(reading)
        try:
            if uid:
                become(uid)
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child of uid {uid} ended with status {status}"
    succeeded, result = pickle.loads(content)
    assert succeeded, result
    return result


def folder_of(uid: int, path: Path, mode: int) -> Path:
    """Make a folder with an owner and permissions."""
    path.mkdir()
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path
