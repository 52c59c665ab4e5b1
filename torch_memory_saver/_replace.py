"""The replacement of this process by another program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

__all__ = ["replace_process"]

#: Exit statuses of a command that could not be started, as in shells.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
#: Python ignores these signals, and a program inherits that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def replace_process(command: Sequence[str], variables: Mapping[str, str], who: str) -> int:
    """Replace this process by the program that `command` names, with `variables` as its environment.

    Signals, the terminal and the exit status are then the program's own.

    Args:
        who: The command of this package, for the message if the program cannot be started.

    Returns:
        The exit status that a shell would give. The function returns only if the program could not be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(variables))
    except OSError as error:
        message = f"error: {command[0]} could not be started: {error.strerror}"
        print(f"python -m torch_memory_saver {who}: {message}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
