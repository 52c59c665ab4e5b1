"""Which process a snapshot comes from: its rank and its role."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["default_role", "own_rank"]

_ROLE_VARIABLE = "TMS_SNAPSHOT_ROLE"
_COMMAND_LINE = "/proc/self/cmdline"


def own_rank() -> int | None:
    """The rank in torch.distributed if that is initialised, else in the variable ``RANK``; None without either."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def default_role() -> str:
    """The role that ``TMS_SNAPSHOT_ROLE`` names. Without it, the title that the process has given itself, as servers do with
    setproctitle; else the program's name."""
    return os.environ.get(_ROLE_VARIABLE, "").strip() or _own_title() or _program_name(sys.argv, sys.orig_argv)


def _own_title() -> str:
    """The title that replaced this process's command line; "" if none did."""
    try:
        with open(_COMMAND_LINE, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # no /proc: the role falls back to the program's name
        return ""
    title = words[0].decode(errors="replace").strip()
    return "" if not sys.orig_argv or title == sys.orig_argv[0] else title


def _program_name(arguments: Sequence[str], original: Sequence[str]) -> str:
    path = arguments[0] if arguments and arguments[0] not in ("", "-c", "-m") else ""
    name = os.path.basename(path)
    if name == "__main__.py":  # python -m package
        name = os.path.basename(os.path.dirname(path))
    return name.removesuffix(".py") or (os.path.basename(original[0]) if original else "") or "python"
