"""The base of the public class: its implementation, created at the first use, and its settings."""

from __future__ import annotations

from typing import Any

from torch_memory_saver._saver import hook_modes, preload
from torch_memory_saver._saver.implementation import Implementation
from torch_memory_saver._saver.settings import suggestion
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.errors import InvalidStateError

__all__ = ["UsedAtFirstCall", "given"]


def given(**options: tuple[Any, Any]) -> dict[str, Any]:
    """Of options, each with its default, those that differ from it: programs install implementations that know no others."""
    return {name: value for name, (value, default) in options.items() if not _equals(value, default)}


def _equals(value: Any, default: Any) -> bool:
    """Return whether an option has its default. Objects whose comparison may return or raise anything are not compared: the
    check of the option names them."""
    return value is default or (isinstance(value, (int, str)) and value == default)


@eager_methods
class UsedAtFirstCall:
    """Holds the implementation, and forwards settings to it."""

    def __init__(self) -> None:
        # Existing programs use both names to inspect and replace the implementation.
        self._impl: Any = None
        self._impl_ctor_kwargs: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for unknown names, except private ones, which existing programs set."""
        if not name.startswith("_") and not hasattr(type(self), name):
            settable = [key for key, kind in vars(UsedAtFirstCall).items() if isinstance(kind, property) and kind.fset]
            raise AttributeError(f"torch_memory_saver has no setting {name!r}{suggestion(name, settable)}")
        super().__setattr__(name, value)

    def _ensure_initialized(self) -> None:
        """Creates the implementation at the first use."""
        if self._impl is not None:
            return
        mode = self._impl_ctor_kwargs.get("hook_mode", "auto")
        factory = hook_modes.factory_of(mode)
        implementation = Implementation(**self._impl_ctor_kwargs) if factory is None else factory()
        if implementation is None:
            raise InvalidStateError(
                f"the factory of hook mode {mode!r} returned None instead of an implementation", operation="initialize"
            )
        self._impl = implementation

    def _use(self) -> Any:
        if self._impl is None:
            self._ensure_initialized()
        return self._impl

    @property
    def enabled(self) -> bool:
        """Always True: this is the real saver."""
        return True

    @property
    def hook_mode(self) -> str:
        """How allocations are intercepted: "preload" or "torch"; "auto", the default, until the first use decides.

        "preload" if the process was started with the preload library (see :func:`configure_subprocess`): allocations of
        every library are managed inside regions. "torch" otherwise: only PyTorch's allocations are. Before the first use it
        may be set to "preload", which makes that mode mandatory, or to a name passed to :func:`register_hook_mode`. "torch"
        has no effect in a preloaded process.

        Raises:
            InvalidArgumentError: Set to an unknown mode.
            InvalidStateError: Set after the first use to a mode that is not in force.
        """
        if self._impl is None:
            return self._impl_ctor_kwargs.get("hook_mode", "auto")
        # Programs that replace the implementation may delete its arguments.
        chosen = getattr(self, "_impl_ctor_kwargs", {}).get("hook_mode", "auto")
        other = preload.mode_in_force() if chosen in hook_modes.BUILT_IN else chosen
        return str(getattr(self._impl, "hook_mode", other))

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        hook_modes.check_hook_mode(mode)
        if self._impl is None:
            if mode == "auto":
                self._impl_ctor_kwargs.pop("hook_mode", None)
            else:
                self._impl_ctor_kwargs["hook_mode"] = mode
        elif mode != self.hook_mode and mode not in ("auto", "torch"):
            raise InvalidStateError(
                f'hook_mode cannot become "{mode}" after the first use: "{self.hook_mode}" is in force',
                operation="set hook_mode",
            )

    @property
    def memory_margin_bytes(self) -> int:
        """A managed allocation that would leave less free memory on its device than this fails as out of memory. Default 0.

        Raises:
            InvalidArgumentError: Set to a value that is not a number of bytes.
        """
        return int(self._use().memory_margin_bytes)

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._use().memory_margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps CPU backups for the next pause and for :meth:`get_cpu_backup`. Default False, or
        ``TMS_RETAIN_CPU_BACKUP``. Read at each resume. True is the same as :attr:`host_memory` "retain"."""
        return bool(self._use().retain_cpu_backup)

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._use().retain_cpu_backup = value

    @property
    def guard(self) -> bool:
        """Guard mode, for debugging: shows a tensor that is used while it is paused, or before the engine has restored it.

        While memory is paused, its addresses are mapped read-only to a page of 0xFF bytes: a late read finds NaN (integers
        -1), a late copy into it is an error of that call, a late write by a kernel is a fault. Memory that a resume brings
        back without contents is 0xFF as well, unless the call has ``zero=True``. Resumes, and frees of paused memory, wait
        for the devices. Default False, or ``TMS_GUARD``.

        It may change at any time, for the pauses and resumes that begin afterwards: what is guarded stays so until it is
        resumed or freed. A pause does not fail because of it: memory that could not be guarded is paused without, with a
        warning in the log, and ``stats().counters["guard_failures_total"]`` counts it.

        Raises:
            InvalidArgumentError: Set to something else than True or False.
        """
        return bool(self._use().guard)

    @guard.setter
    def guard(self, value: bool) -> None:
        self._use().guard = value

    @property
    def host_memory(self) -> str:
        """What happens to host memory after a resume if neither the call nor the region sets it: "release" (released to the
        system; the default), "pool" (kept, pinned, for any later backup) or "retain" (kept with its contents).

        The environment sets its initial value (``TMS_HOST_MEMORY``) and the limits: ``TMS_HOST_MEMORY_LIMIT_MB`` is the
        maximum for backups and the pool together, in MiB; ``TMS_HOST_POOL_LIMIT_MB`` is the maximum that the pool keeps. The
        limits of a container and the available memory of the system always apply.

        Raises:
            InvalidArgumentError: Set to another value.
        """
        return str(self._use().host_memory)

    @host_memory.setter
    def host_memory(self, value: str) -> None:
        self._use().host_memory = value

    @property
    def share_for(self) -> str | None:
        """The release of PyTorch, such as "2.11", in the processes that receive managed tensors from this one. None, the
        default: the same as here. Releases before 2.13 cannot read the description of shared memory that later ones write,
        nor the other way round. Read at each send.

        Raises:
            InvalidArgumentError: Set to something else, or to a release before 2.6.
        """
        release: str | None = self._use().share_for
        return release

    @share_for.setter
    def share_for(self, release: str | None) -> None:
        self._use().share_for = release
