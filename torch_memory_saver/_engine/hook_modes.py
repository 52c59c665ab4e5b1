"""The hook modes that a program can select: the built-in ones, and its own implementations under other names.

A registered mode is a factory, called at the first use of a saver with that mode. Its result replaces
:class:`torch_memory_saver._engine.engine.Engine`: the saver's methods call its methods of the same names.
Registrations belong to the process: a child process that was not forked registers its own. Any thread may register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["BUILT_IN", "check_hook_mode", "factory_of", "register_hook_mode", "uses_preload"]

#: The modes of this package. "auto" becomes one of the other two at the first use.
BUILT_IN = ("auto", "preload", "torch")


class _Registered(NamedTuple):
    factory: Callable[[], Any]
    uses_preload: bool


_registered: dict[str, _Registered] = {}


def register_hook_mode(name: str, factory: Callable[[], Any], *, uses_preload: bool = True) -> None:
    """Makes `name` a value of ``hook_mode``.

    Args:
        name: The mode's name; any non-empty str except the names of built-in modes.
        factory: Called without arguments at the first use of a saver with the mode. Returns the implementation: an object
            with the methods that the program calls on the saver, such as ``region``, ``cuda_graph``, ``disable``, ``pause``
            and ``resume``. These get the saver's arguments by keyword; arguments that the C++ package's methods lack are
            passed only if given. Other methods get paths, tensors and sizes by position.
        uses_preload: Whether ``configure_subprocess()`` sets ``LD_PRELOAD`` while the mode is selected.

    Raises:
        InvalidArgumentError: The name is empty or taken, or the factory cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"the name of a hook mode must be a non-empty str, not {name!r}")
    if not callable(factory):
        raise InvalidArgumentError(f"the factory of hook mode {name!r} cannot be called: {factory!r}")
    entry = _Registered(factory, bool(uses_preload))
    if name in BUILT_IN or _registered.setdefault(name, entry) is not entry:
        raise InvalidArgumentError(f"hook mode {name!r} is registered already: choose another name")


def check_hook_mode(mode: object) -> str:
    """The mode, if it is a built-in or a registered one."""
    if not isinstance(mode, str) or (mode not in BUILT_IN and mode not in _registered):
        raise InvalidArgumentError(
            f'hook_mode must be "auto", "preload" or "torch", or a name given to register_hook_mode() in this process, '
            f"not {mode!r}"
        )
    return mode


def factory_of(mode: str) -> Callable[[], Any] | None:
    """The factory of a registered mode; None for any other mode."""
    entry = _registered.get(mode)
    return None if entry is None else entry.factory


def uses_preload(mode: str) -> bool:
    """Whether a process with that mode starts child processes with the preload library."""
    entry = _registered.get(mode)
    return entry is None or entry.uses_preload
