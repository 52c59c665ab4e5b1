"""The command `run`: set up a program's environment so that it is preloaded and recorded, or print it for a launcher."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_memory_saver import _startup
from torch_memory_saver._engine import background, preload
from torch_memory_saver._engine.variables import path_at_import
from torch_memory_saver._folders import PRIVATE_FOLDER, opened_folder, why_not_writable
from torch_memory_saver._replace import replace_process
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = ["ChildOptions", "options_of", "print_environment", "run_program", "variables_for"]


def _shell(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _ray(variables: Mapping[str, str]) -> str:
    return json.dumps({"env_vars": variables}, indent=2) + "\n"


def _prefix(variables: Mapping[str, str]) -> str:
    """Return a command prefix that sets the variables by `env`, because torchrun gives its own environment to the
    workers."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())]) + "\n"


_FORMATS: Mapping[str, Callable[[Mapping[str, str]], str]] = {"shell": _shell, "json": _ray, "torchrun": _prefix}
#: Variables with a path that Python reads.
_PATHS = ("TMS_DEBUG_DIR", "TMS_METRICS_FILE")


@dataclass(frozen=True)
class ChildOptions:
    """The options that the user has requested.

    Attributes:
        preloaded: Whether the hook library is preloaded (hook mode "preload").
        manage: Whether allocations outside of regions are managed too (TMS_INIT_ENABLE).
        record: Words of TMS_DEBUG. If there are none, the variable stays as it is.
        directory: Absolute path of TMS_DEBUG_DIR, or None to leave the variable as it is.
    """

    preloaded: bool = False
    manage: bool = False
    record: Sequence[str] = ()
    directory: str | None = None


def options_of(arguments: argparse.Namespace) -> ChildOptions:
    """Return the options that were given. A folder's path becomes absolute, because the program may change its own
    folder."""
    if arguments.directory and not (arguments.record or os.environ.get("TMS_DEBUG")):
        raise InvalidArgumentError("--directory has no effect without --record", operation="run")
    return ChildOptions(
        preloaded=arguments.preload or arguments.manage,
        manage=arguments.manage,
        record=arguments.record,
        directory=os.path.abspath(arguments.directory) if arguments.directory else None,
    )


def variables_for(options: ChildOptions, base: Mapping[str, str], operation: str) -> dict[str, str]:
    """Return the variables to set in an environment that has those of `base`. Entries of lists are kept, behind the new
    ones.

    Raises:
        InvalidStateError: The hook library is not installed or cannot be named.
    """
    result: dict[str, str] = {}
    if options.preloaded:
        result |= preload.preload_variables(base.get("LD_PRELOAD", ""), operation)
    if options.manage:
        result["TMS_INIT_ENABLE"] = "1"
    if options.record:
        result["TMS_DEBUG"] = ",".join(options.record)
        # Absolute, because the program may change its own folder.
        result["TMS_DEBUG_DIR"] = options.directory or background.debug_folder()
    elif options.directory is not None:
        result["TMS_DEBUG_DIR"] = options.directory
    if _startup.is_requested(dict(base) | result):
        result["PYTHONPATH"] = _with_startup(base.get("PYTHONPATH", ""), operation)
        # The child reads these when it uses CUDA, and may have changed its own folder by then.
        for name in _PATHS:
            if base.get(name, "").strip():
                result.setdefault(name, path_at_import(base[name].strip()))
    return result


def _with_startup(before: str, operation: str) -> str:
    folder = _startup.FOLDER
    if os.pathsep in folder:
        raise InvalidStateError(
            f"PYTHONPATH cannot name '{folder}', because of the colon in it: install the package elsewhere",
            operation=operation,
        )
    return os.pathsep.join([folder, *(entry for entry in before.split(os.pathsep) if entry and entry != folder)])


def run_program(command: Sequence[str], arguments: argparse.Namespace) -> int:
    """Become the program, in the environment that the options request. Returns the exit status where that is emulated.

    Raises:
        InvalidArgumentError: The folder for what is recorded cannot be written to.
        InvalidStateError: As `variables_for`.
    """
    options = options_of(arguments)
    variables = variables_for(options, os.environ, "run")
    if options.record:
        _make(variables["TMS_DEBUG_DIR"])
    return replace_process(command, os.environ | variables, "run")


def print_environment(arguments: argparse.Namespace) -> None:
    """Print the environment that the options request, for a launcher.

    Raises:
        InvalidArgumentError: The options request nothing.
        InvalidStateError: As `variables_for`.
    """
    variables = variables_for(options_of(arguments), os.environ, "run")
    if not variables:
        raise InvalidArgumentError("there is nothing to set: give --preload, --manage or --record", operation="run")
    # A path need not be text in the terminal's encoding.
    sys.stdout.buffer.write(os.fsencode(_FORMATS[arguments.print_env](variables)))


def _make(folder: str) -> None:
    """Make the folder now, so that a folder that cannot be written to is an error, and not a warning of each process."""
    try:
        with opened_folder(folder, mode=PRIVATE_FOLDER) as made:
            problem = why_not_writable(made.path)
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise InvalidArgumentError(
            f"nothing can be recorded in {folder}: it cannot be written to: {problem}: choose another --directory.",
            operation="run",
        )
