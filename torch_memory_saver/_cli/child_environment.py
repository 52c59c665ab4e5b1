"""The environment with which `run` and `env` have a program preloaded and recorded, without a change of the program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver._engine import background, preload
from torch_memory_saver._torch.layer import expandable_segments_on
from torch_memory_saver.errors import InvalidStateError

__all__ = ["ChildOptions", "add_arguments", "options_of", "variables_for"]

#: The folder of the sitecustomize.py that starts the recording in Python programs.
_STARTUP = Path(os.path.abspath(__file__)).parent / "startup"


@dataclass(frozen=True)
class ChildOptions:
    """What the user has asked for.

    Attributes:
        preloaded: The hook library is preloaded (hook mode "preload").
        ledger: That library also stands before look-ups (TMS_LEDGER).
        manage: Allocations outside of regions are managed too (TMS_INIT_ENABLE).
        events: The absolute path of the folder for event files; None: no event files.
        history: The number of entries of PyTorch's memory history; None: none is recorded.
    """

    preloaded: bool = False
    ledger: bool = False
    manage: bool = False
    events: str | None = None
    history: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--preload", action="store_true", help='preload the hook library (hook mode "preload")')
    parser.add_argument(
        "--manage",
        action="store_true",
        help="manage every allocation, also of a program that never imports torch_memory_saver; implies --preload",
    )
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="have ledger() count libraries that look up the driver's functions, as NCCL does; implies --preload",
    )
    parser.add_argument("--events", metavar="DIR", help="write an event file for each process into this folder")
    parser.add_argument(
        "--history", type=_entries, metavar="N", help="have PyTorch record the latest N allocations and frees of each GPU"
    )


def _entries(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def options_of(arguments: argparse.Namespace) -> ChildOptions:
    """The options that were given. A folder's path becomes absolute, because the program may change its own folder."""
    return ChildOptions(
        preloaded=arguments.preload or arguments.manage or arguments.ledger,
        ledger=arguments.ledger,
        manage=arguments.manage,
        events=os.path.abspath(arguments.events) if arguments.events else None,
        history=arguments.history,
    )


def variables_for(options: ChildOptions, base: Mapping[str, str], operation: str) -> dict[str, str]:
    """The variables to set in an environment that has those of `base`. Entries of lists are kept, behind the new ones.

    Raises:
        InvalidStateError: The hook library is not installed or cannot be named; or everything is to be managed while
            PyTorch's expandable segments are on.
    """
    result: dict[str, str] = {}
    if options.preloaded:
        result |= preload.preload_variables(base.get("LD_PRELOAD", ""), operation, options.ledger)
    if options.manage:
        if expandable_segments_on(base):
            raise InvalidStateError(
                "--manage has no effect while PyTorch's expandable segments are on, because they bypass cudaMalloc: take "
                "expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF",
                operation=operation,
            )
        result["TMS_INIT_ENABLE"] = "1"
    if options.events is not None:
        result["TMS_EVENTS_DIR"] = options.events
    if options.history is not None:
        result["TMS_MEMORY_HISTORY"] = str(options.history)
    if any((dict(base) | result).get(name, "").strip() for name in background.starters):
        result["PYTHONPATH"] = _with_startup(base.get("PYTHONPATH", ""), operation)
    return result


def _with_startup(before: str, operation: str) -> str:
    folder = str(_STARTUP)
    if os.pathsep in folder:
        raise InvalidStateError(
            f"PYTHONPATH cannot name '{folder}', because of the colon in it: install the package elsewhere",
            operation=operation,
        )
    return os.pathsep.join([folder, *(entry for entry in before.split(os.pathsep) if entry and entry != folder)])
