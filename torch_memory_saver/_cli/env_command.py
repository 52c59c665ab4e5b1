"""The command `env`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping

from torch_memory_saver._cli.command import Command
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["EnvCommand"]


def _shell(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _ray(variables: Mapping[str, str]) -> str:
    return json.dumps({"env_vars": variables}, indent=2) + "\n"


def _prefix(variables: Mapping[str, str]) -> str:
    """torchrun gives its own environment to the workers, so it is started by `env` with the variables."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())]) + "\n"


_FORMATS: Mapping[str, Callable[[Mapping[str, str]], str]] = {"shell": _shell, "json": _ray, "torchrun": _prefix}


class EnvCommand(Command):
    """Prints the environment for a child process."""

    name = "env"
    help = "print the environment that run gives to a program, for a shell, Ray or torchrun"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver._cli import child_environment

        child_environment.add_arguments(parser)
        parser.add_argument(
            "--format",
            choices=list(_FORMATS),
            default="shell",
            help="shell: export lines (the default); json: Ray's runtime_env; torchrun: what to write before torchrun",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli import child_environment

        options = child_environment.options_of(arguments)
        variables = child_environment.variables_for(options, os.environ, "env")
        if not variables:
            raise InvalidArgumentError(
                "there is nothing to set: give --preload, --manage, --ledger, --events or --history", operation="env"
            )
        # A path need not be text in the terminal's encoding.
        sys.stdout.buffer.write(os.fsencode(_FORMATS[arguments.format](variables)))
        return 0
