"""The hook modes that a program can select: the built-in ones, and its own implementations under other names.

A registered mode is a factory, called at the first use of a saver with that mode. Its result replaces
:class:`torch_memory_saver._engine.engine.Engine`: the saver's methods call its methods of the same names. :class:`HookMode`
lists these methods. Registrations belong to the process: a child process that was not forked registers its own. Any thread
may register.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch_memory_saver.errors import InvalidArgumentError

if TYPE_CHECKING:
    from types import TracebackType

    from torch_memory_saver._engine.calls.pending import PendingResume
    from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle
    from torch_memory_saver._engine.tensors.preserved import PreserveHandle
    from torch_memory_saver.reports.freshness import FreshReport
    from torch_memory_saver.reports.ledger import Ledger
    from torch_memory_saver.reports.transitions import PauseReport, ResumeReport
    from torch_memory_saver.reports.usage import PreservedBlock, Stats

__all__ = [
    "BUILT_IN",
    "DecoratingContext",
    "HookMode",
    "check_hook_mode",
    "factory_of",
    "register_hook_mode",
    "uses_preload",
]

#: The modes of this package. "auto" becomes one of the other two at the first use.
BUILT_IN = ("auto", "preload", "torch")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DecoratingContext(Protocol):
    """A context manager that also decorates functions, each call of which is then inside it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def __call__(self, function: _Function, /) -> _Function: ...


class HookMode(Protocol):
    """The implementation of a saver: the saver uses these methods and settings, and documents them under the same names.

    The engine has all of them. An implementation that a program registers may lack those that the program does not use. It
    may also lack parameters that have a default here, and the options of ``pause`` and ``resume``, which are the keywords of
    the saver's methods: the saver passes such an argument only if it is not the default.
    """

    memory_margin_bytes: int
    retain_cpu_backup: bool
    guard: bool
    host_memory: str
    share_for: str | None

    def region(
        self,
        *,
        tag: str,
        enable_cpu_backup: bool,
        enable_disk_backup: bool = ...,
        cpu_backup_backend: str | None = ...,
        backup: str | None = ...,
        host_memory: str | None = ...,
        runs: bool = ...,
        threads: bool = ...,
    ) -> DecoratingContext: ...

    def cuda_graph(
        self,
        *,
        cuda_graph: Any,
        pool: Any,
        stream: Any,
        capture_error_mode: str,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = ...,
        backup: str | None = ...,
        host_memory: str | None = ...,
        runs: bool = ...,
    ) -> DecoratingContext: ...

    def disable(self) -> DecoratingContext: ...

    def pause(self, *, tag: Any, **options: Any) -> PauseReport: ...

    def resume(self, *, tag: Any, **options: Any) -> ResumeReport | PendingResume: ...

    def bind_region(self, function: _Function, /) -> _Function: ...

    def manage(self, what: Any, /, *, tag: str = ..., backup: str | None = ...) -> ManageHandle: ...

    def preserve(self, what: Iterable[Any], /, *, tag: str | None, parameters: bool) -> PreserveHandle: ...

    def preserved(self, tag: Any, /) -> tuple[PreservedBlock, ...]: ...

    def check_fresh(self, tag: Any, /, *, ignore: Any, modules: Any, whole: bool) -> FreshReport: ...

    def empty_cache(self) -> None: ...

    def get_cpu_backup(self, x: Any, /, *, zero_copy: bool) -> Any: ...

    def set_disk_backup_dir(self, path: str | os.PathLike[str], /) -> None: ...

    def reserve_host_memory(self, bytes: int, device: Any, /) -> None: ...

    def release_host_memory(self) -> None: ...

    def enable_peer_access(self) -> None: ...

    def stats(self, tags: tuple[str, ...] | None, device: int | None, /) -> Stats: ...

    def ledger(self, device: int | None, measure_context: bool, /) -> Ledger: ...

    def reset_peaks(self) -> None: ...


class _Registered(NamedTuple):
    factory: Callable[[], HookMode]
    uses_preload: bool


_registered: dict[str, _Registered] = {}


def register_hook_mode(name: str, factory: Callable[[], Any], *, uses_preload: bool = True) -> None:
    """Make `name` a valid value of ``hook_mode``, implemented by the result of `factory`.

    Args:
        name: The mode's name; any non-empty str except the names of built-in modes.
        factory: Called without arguments at the first use of a saver with the mode. Returns the implementation: an object
            with the methods of :class:`HookMode` that the program calls on the saver. ``region``, ``cuda_graph``, ``pause``
            and ``resume`` get the saver's arguments by keyword; arguments that the C++ package's methods lack are passed
            only if given. Other methods get paths, tensors and sizes by position.
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
    """Return the mode if it is a built-in or a registered one.

    Raises:
        InvalidArgumentError: The mode is neither.
    """
    if not isinstance(mode, str) or (mode not in BUILT_IN and mode not in _registered):
        raise InvalidArgumentError(
            f'hook_mode must be "auto", "preload" or "torch", or a name given to register_hook_mode() in this process, '
            f"not {mode!r}"
        )
    return mode


def factory_of(mode: str) -> Callable[[], HookMode] | None:
    """Return the factory of a registered mode, or None for any other mode."""
    entry = _registered.get(mode)
    return None if entry is None else entry.factory


def uses_preload(mode: str) -> bool:
    """Return whether a process with that mode starts child processes with the preload library."""
    entry = _registered.get(mode)
    return entry is None or entry.uses_preload
