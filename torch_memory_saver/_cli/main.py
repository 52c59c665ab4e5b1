"""The command line: what all commands share, which is options, errors and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from torch_memory_saver import __version__
from torch_memory_saver._cli.commands import COMMANDS
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["MODULE", "SCRIPT", "main"]

#: How users call the command line: by the script that pip installs, and without it.
SCRIPT, MODULE = "torch-memory-saver", "python -m torch_memory_saver"

#: Exit statuses. Those after Ctrl-C and after the reader of the output has gone are those that shells give.
_FAILED, _INTERRUPTED, _BROKEN_PIPE = 1, 130, 141


def main(argv: Sequence[str] | None = None, program: str = SCRIPT) -> int:
    """Runs the command that `argv` (default: the process's arguments) names and returns the exit status.

    A failure is one sentence on stderr, and the traceback before it with ``--debug``. `program` is what the user has called.

    Raises:
        SystemExit: The arguments are wrong (status 2), or ask for help or the version.
    """
    arguments = argparse.Namespace(debug=False)
    try:
        try:
            _parser(program).parse_args(argv, arguments)
            status: int = arguments.run(arguments)
        finally:
            _flush_output()
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"{program}: {_sentence(error, arguments.debug)}", file=sys.stderr)
        return _FAILED


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Pause and resume the GPU memory of tensors without changing their addresses."
    )
    parser.add_argument("--version", action="version", version=f"torch_memory_saver {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    # Also behind the name of the command, where it leaves the value alone unless it is given.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(title="commands", metavar="command", required=True)
    for command in (kind() for kind in COMMANDS):
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help, parents=[shared])
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _sentence(error: Exception, debug: bool) -> str:
    """What has failed, on one line. The messages of this package's errors are complete."""
    text = " ".join(str(error).split())
    if isinstance(error, TorchMemorySaverError):
        return f"{type(error).__name__}: {text}"
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    hint = "" if debug else "; --debug prints the traceback"
    return f"unexpected {type(error).__name__}: {text or 'no message'}{hint}"


def _flush_output() -> None:
    """Writes what is in the buffer of stdout. Python would try again at its end, so a failure discards it."""
    if sys.stdout is None:  # it is closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise
