"""The command line: the options, errors and exit statuses that all commands share."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from torch_memory_saver import __version__
from torch_memory_saver._additions import added
from torch_memory_saver._text import reason_of, suggestion
from torch_memory_saver.errors import InvalidArgumentError, TorchMemorySaverError

__all__ = ["MODULE", "SCRIPT", "main"]

#: Names by which users call the command line: the script that pip installs, and the module.
SCRIPT, MODULE = "torch-memory-saver", "python -m torch_memory_saver"

#: Exit statuses. The statuses after Ctrl-C and after an early exit of the reader of the output are those that shells give.
_FAILED, _WRONG_USE, _INTERRUPTED, _BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None, program: str = SCRIPT) -> int:
    """Run the command that `argv` (default: the process's arguments) names and return the exit status. Print the help if
    there is no command.

    A failure is one sentence on stderr, in the form of argparse's own errors: the program and the command, ``error:``, and
    the sentence. The traceback precedes it with ``--debug``. `program` is the name by which the user has called the program.
    ``help COMMAND`` is ``COMMAND --help``.

    Raises:
        SystemExit: The arguments are wrong (status 2), or request the help or the version.
    """
    arguments = argparse.Namespace(debug=False)
    try:
        try:
            words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
            if words[0] == "help":
                words = [*words[1:], "--help"]
            parser = _parser(program, words)
            _, unknown = parser.parse_known_args(words, arguments)
            if unknown:
                option, known = unknown[0].partition("=")[0], arguments.parser._option_string_actions
                meant = "; write it after the command" if option in known else suggestion(option, known)
                arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
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
        who = arguments.parser.prog if "parser" in arguments else program
        print(f"{who}: error: {_sentence(error, arguments)}", file=sys.stderr)
        return _WRONG_USE if isinstance(error, InvalidArgumentError) else _FAILED


def _parser(program: str, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that the words name, or of all commands. End the program if there is no command of
    that name, and name one that is like it. No option of the parser takes a value, so the first other word is the command.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description="Pause and resume the GPU memory of tensors without changing their addresses.",
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser, run=lambda _: parser.error("the following arguments are required: command"))
    parser.add_argument("-V", "-v", "--version", action="version", version=f"torch_memory_saver {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    # The option is accepted after the name of the command as well. Its absence there does not change the value.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(title="commands", metavar="command")
    commands = added("command")
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in commands:
        advice = suggestion(name, commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {name!r}{advice}")
    for command in (make() for make in (commands.values() if name is None else [commands[name]])):
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=command.help, parents=[shared], allow_abbrev=False
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _sentence(error: Exception, arguments: argparse.Namespace) -> str:
    """Return a description of the failure, on one line. The messages of this package's errors are complete, and may begin
    with the name of the command."""
    text = " ".join(str(error).split())
    if isinstance(error, TorchMemorySaverError):
        return text.removeprefix(f"{error.operation}: ")
    if isinstance(error, OSError) and error.strerror:
        return reason_of(error)
    hint = "" if arguments.debug else "; --debug prints the traceback"
    return f"unexpected {type(error).__name__}: {text or 'no message'}{hint}"


def _flush_output() -> None:
    """Write what is in the buffer of stdout. Python would try again at its end, so a failure discards it."""
    if sys.stdout is None:  # it is closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise
