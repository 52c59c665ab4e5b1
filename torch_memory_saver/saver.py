"""The public class :class:`TorchMemorySaver` and its one instance, ``torch_memory_saver.torch_memory_saver``.

Each method contains its complete documentation and makes one call of the engine. The engine is created at the first use.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast, overload

from torch_memory_saver import _core
from torch_memory_saver._engine import hook_modes, preload
from torch_memory_saver._engine.calls import hooks
from torch_memory_saver._engine.calls.hooks import Hook, HookCall, HookHandle
from torch_memory_saver._engine.calls.pending import PendingResume
from torch_memory_saver._engine.disabled import DisabledEngine
from torch_memory_saver._engine.engine import Engine
from torch_memory_saver._engine.hook_modes import DecoratingContext, HookMode
from torch_memory_saver._engine.tensors.lookup import is_paused, tag_of
from torch_memory_saver._engine.tensors.preserved import PreserveHandle
from torch_memory_saver._patches import Patch, patches_in_force
from torch_memory_saver._text import suggestion
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import eager_methods
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.options import (
    DEFAULT_TAG,
    check_device,
    check_flag,
    check_tag,
    check_tags,
    errors_of,
    select_tags,
)
from torch_memory_saver.reports.freshness import FreshReport
from torch_memory_saver.reports.ledger import Ledger
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport
from torch_memory_saver.reports.usage import PreservedBlock, Stats

if TYPE_CHECKING:
    import torch

    from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle

    Preservable: TypeAlias = torch.Tensor | torch.nn.Module | Iterable[Any]

    class _HasStep(Protocol):
        """An object that wraps optimizers, such as those of DeepSpeed and Megatron-LM."""

        def step(self, *arguments: Any, **keywords: Any) -> Any: ...

    Manageable: TypeAlias = torch.Tensor | torch.nn.Module | torch.optim.Optimizer | _HasStep | Iterable[Any]
    Ignorable: TypeAlias = str | torch.Tensor | torch.nn.Module | Iterable[Any]

__all__ = ["TorchMemorySaver", "forward_settings", "torch_memory_saver"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Backup: TypeAlias = Literal["host", "mmap", "disk", "shared"] | None
_HostMemory: TypeAlias = Literal["release", "pool", "retain"] | None
_Tag: TypeAlias = str | Iterable[str] | None
_When: TypeAlias = Literal["before", "after"]
_Cancelled: TypeAlias = Callable[[BaseException], Any] | None
_Callback = TypeVar("_Callback", bound=Callable[[HookCall], Any])


class _RegisterHook(Protocol):
    """The signature of :meth:`TorchMemorySaver.on_pause` and :meth:`TorchMemorySaver.on_resume`."""

    @overload
    def __call__(
        self, tag: _Tag, when: _When, callback: Callable[[HookCall], Any], *, cancelled: _Cancelled = None
    ) -> HookHandle: ...

    @overload
    def __call__(self, tag: _Tag, when: Hook) -> HookHandle: ...

    @overload
    def __call__(
        self, tag: _Tag = None, when: _When = "before", *, cancelled: _Cancelled = None
    ) -> Callable[[_Callback], _Callback]: ...


def _registers_hooks(method: Callable[..., Any]) -> _RegisterHook:
    """Tell type checkers the overloads of a method. The method itself stays."""
    return cast(_RegisterHook, method)


@eager_methods
class TorchMemorySaver:
    """The object that pauses and resumes GPU memory without changing its addresses.

    No driver is loaded and no device is used before the first use. All sizes are bytes. Every method may be called from any
    thread; a region applies only to the thread that enters it. Failures are exceptions of :mod:`torch_memory_saver.errors`.
    A failed call changes nothing, except where the driver fails to release memory: see :meth:`pause` and :meth:`resume`.

    A process has one saver. Copies of it are the object itself, and unpickling it in another process gives the saver of that
    process.
    """

    def __init__(self) -> None:
        # Existing programs use both names to inspect and replace the implementation.
        self._impl: HookMode | None = None
        self._impl_ctor_kwargs: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<TorchMemorySaver: hook mode {self.hook_mode}, {'not used yet' if self._impl is None else 'in use'}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and raise AttributeError if its name is unknown.

        Unknown private names are accepted, because existing programs set them.
        """
        if not name.startswith("_") and not hasattr(type(self), name):
            settable = [key for key, kind in vars(TorchMemorySaver).items() if isinstance(kind, property) and kind.fset]
            raise AttributeError(f"torch_memory_saver has no setting {name!r}{suggestion(name, settable)}")
        super().__setattr__(name, value)

    def _ensure_initialized(self) -> None:
        """Create the implementation at the first use."""
        if self._impl is not None:
            return
        mode = self._impl_ctor_kwargs.get("hook_mode", "auto")
        factory = DisabledEngine if _core.get_disabled() else hook_modes.factory_of(mode)
        implementation: HookMode | None = Engine(**self._impl_ctor_kwargs) if factory is None else factory()
        if implementation is None:
            raise InvalidStateError(
                f"the factory of hook mode {mode!r} returned None instead of an implementation", operation="initialize"
            )
        self._impl = implementation

    def _use(self) -> HookMode:
        implementation = self._impl
        if implementation is None:
            self._ensure_initialized()  # or what a program has put in its place
            implementation = cast(HookMode, self._impl)
        return implementation

    def __reduce__(self) -> tuple[Callable[[], TorchMemorySaver], tuple[()]]:
        """Pickle the saver by reference, so that unpickling gives the saver of the process that unpickles it."""
        return _saver_of_this_process, ()

    def __copy__(self) -> TorchMemorySaver:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchMemorySaver:
        return self

    @property
    def enabled(self) -> bool:
        """Always True; kept for programs that were written for the C++ package."""
        return True

    @property
    def hook_mode(self) -> str:
        """Way in which allocations are intercepted: "preload" or "torch", or "auto" before the first use.

        "auto" is the default, and the first use replaces it. The mode becomes "preload" if the process was started with the
        preload library (see :func:`configure_subprocess`): allocations of every library are then managed inside regions.
        Otherwise it becomes "torch": only PyTorch's allocations are then managed. Before the first use the mode may be set
        to "preload", which makes that mode mandatory, or to a name passed to :func:`register_hook_mode`. Setting "torch" has
        no effect in a preloaded process.

        Raises:
            InvalidArgumentError: The new value is an unknown mode.
            InvalidStateError: After the first use, the new value is a mode that is not in force and is neither "auto" nor
                "torch".
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
                f'hook_mode cannot become "{mode}" after the first use: "{self.hook_mode}" is in force. Set it before the '
                "first call",
                operation="set hook_mode",
            )

    @property
    def memory_margin_bytes(self) -> int:
        """Number of free bytes that a managed allocation must leave on its device to succeed; 0 by default.

        An allocation that would leave fewer bytes fails as out of memory.

        Raises:
            InvalidArgumentError: The new value is not a number of bytes.
        """
        return int(self._use().memory_margin_bytes)

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._use().memory_margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps CPU backups for the next pause and for :meth:`get_cpu_backup`.

        The default is False, or the value of ``TMS_RETAIN_CPU_BACKUP``. The setting is read at each resume. True is the same
        as :attr:`host_memory` "retain".
        """
        return bool(self._use().retain_cpu_backup)

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._use().retain_cpu_backup = value

    @property
    def guard(self) -> bool:
        """Whether guard mode is on, which exposes tensors that are used while paused or before the engine has restored them.

        Guard mode is for debugging. While memory is paused, its addresses are mapped read-only to a guard page of 0xFF
        bytes: a late read finds NaN (integers -1), a late copy into it is an error of that call, and a late write by a
        kernel is a fault. Memory that a resume brings back without contents is 0xFF as well, unless the call has
        ``zero=True``. Resumes, and frees of paused memory, wait for the devices. The default is False, or the value of
        ``TMS_GUARD``.

        The setting may change at any time. It applies to the pauses and resumes that begin afterwards: memory that is
        guarded stays so until it is resumed or freed. A pause does not fail because of guard mode. Memory that could not be
        guarded is paused without it, with a warning in the log, and ``stats().counters["guard_failures_total"]`` counts it.

        Raises:
            InvalidArgumentError: The new value is neither True nor False.
        """
        return bool(self._use().guard)

    @guard.setter
    def guard(self, value: bool) -> None:
        self._use().guard = value

    @property
    def host_memory(self) -> str:
        """Use of the host memory of a backup after a resume: "release" (the default), "pool" or "retain".

        "release" gives the memory back to the system. "pool" keeps it, pinned, for any later backup. "retain" keeps it with
        its contents, so that the next pause copies only what has changed. The files of a region with disk backups always
        stay, with "retain" also their contents. The setting applies if neither the call nor the region sets the option.

        The environment sets its initial value (``TMS_HOST_MEMORY``) and the limits: ``TMS_HOST_MEMORY_LIMIT_MB`` is the
        maximum for backups and the pool together, in MiB; ``TMS_HOST_POOL_LIMIT_MB`` is the maximum that the pool keeps. The
        limits of a container and the available memory of the system always apply.

        Raises:
            InvalidArgumentError: The new value is none of the three.
        """
        return str(self._use().host_memory)

    @host_memory.setter
    def host_memory(self, value: str) -> None:
        self._use().host_memory = value

    @property
    def share_for(self) -> str | None:
        """Release of PyTorch, such as "2.11", in the processes that receive managed tensors from this process.

        None (the default) means the same release as in this process. Releases before 2.13 and releases from 2.13 on cannot
        read each other's descriptions of shared memory. The setting is read at each send.

        Raises:
            InvalidArgumentError: The new value is not a release, or is a release before 2.6.
        """
        return self._use().share_for

    @share_for.setter
    def share_for(self, release: str | None) -> None:
        self._use().share_for = release

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Return a context manager that makes child processes started inside load the preload library.

        The context changes ``LD_PRELOAD`` in the environment of this process, for all its threads, and restores it at the
        end. Other entries of ``LD_PRELOAD`` are kept. The context does nothing if :attr:`hook_mode` is a registered mode
        without preloading.

        Raises:
            InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
        """
        if hook_modes.uses_preload(self.hook_mode):
            return preload.configure_subprocess()
        return nullcontext()

    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
        *,
        backup: _Backup = None,
        host_memory: _HostMemory = None,
        runs: bool = True,
        threads: bool = True,
    ) -> DecoratingContext:
        """Return a context manager inside which GPU memory allocated by this thread can be paused and resumed.

        Regions nest, and the innermost applies. Tensors made outside stay ordinary. A region may be entered while its tag is
        paused: new allocations are resident.

        A ``backward()`` inside a region runs on this thread and not on PyTorch's own threads, so that its gradients are
        managed as well. A call that is submitted to a ``concurrent.futures.ThreadPoolExecutor`` inside, also by asyncio's
        ``to_thread``, belongs to the region until it returns, even if the region was left by then. A pause of the tag does
        not wait for such a call: it takes the call out of the region, which is logged. Allocations of other threads are not
        managed, see :meth:`bind_region`.

        Args:
            tag: Name that selects the memory for pause and resume. Any non-empty str is valid. It is never a pattern.
            enable_cpu_backup: The C++ package's ``backup="host"``, also with ``cpu_backup_backend="pinned"``.
            enable_disk_backup: The C++ package's ``backup="disk"``.
            cpu_backup_backend: "mmap" with ``enable_cpu_backup`` is ``backup="mmap"``.
            backup: Where a pause keeps the contents: "host" (pinned host memory, fast), "mmap" (pageable host memory,
                released at the resume), "disk" (a file, see :meth:`set_disk_backup_dir`) or "shared" (one copy in memory for
                all processes of this user that have equal contents, see guides/shared-backups.md of the documentation). With
                None a pause discards them.
            host_memory: Use of the backup's host memory after a resume: "release" (released to the system), "pool"
                (kept, pinned, for any later backup) or "retain" (kept with its contents, for :meth:`get_cpu_backup` and for
                the next pause, which copies only what has changed; a backup on disk is kept as well). None:
                :attr:`host_memory` at that time.
            runs: Whether a resume may back neighbouring allocations by one large physical handle, which is faster. With
                False each allocation keeps a handle of its own, so that a free always gives its memory back at once. Use
                False for tags of which a part is freed between a resume and the next pause, and for tags whose memory is
                shared with other processes.
            threads: Whether calls that are submitted to a thread pool inside belong to the region.

        Raises:
            InvalidArgumentError: An unknown ``backup``, or one together with the C++ package's arguments, or two of these;
                a flag that is neither a bool nor 0, 1 or None; an invalid tag; an unknown ``host_memory``; ``runs`` or
                ``threads`` that is not a bool.
            TorchUnavailableError: Hook mode "torch" and no PyTorch that can use CUDA.
        """
        is_plain = enable_disk_backup is False and cpu_backup_backend is None
        if is_plain and backup is None and host_memory is None and runs is True and threads is True:  # usual, in less time
            return self._use().region(tag=tag, enable_cpu_backup=enable_cpu_backup)
        optional = _changed(
            "region",
            enable_disk_backup=enable_disk_backup,
            cpu_backup_backend=cpu_backup_backend,
            backup=backup,
            host_memory=host_memory,
            runs=runs,
            threads=threads,
        )
        return self._use().region(tag=tag, enable_cpu_backup=enable_cpu_backup, **optional)

    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
        *,
        backup: _Backup = None,
        host_memory: _HostMemory = None,
        runs: bool = True,
    ) -> DecoratingContext:
        """Return a context manager like ``torch.cuda.graph`` whose graph allocates memory that can be paused and resumed.

        A pause without a backup discards the outputs of the last replay: after the resume, replay the graph before reading
        them.

        Args:
            cuda_graph: The graph to capture into.
            pool: A token from ``torch.cuda.graph_pool_handle()``, another graph's ``pool()`` or a ``MemPool``'s ``id``:
                graphs captured here with the same token, tag and backup share one managed pool. In preload mode, or for a
                ``MemPool`` with this package's allocator, it is the token's own pool; otherwise a managed pool replaces it.
                None: a separate pool for this graph.
            stream: The stream to capture on; None is torch's capture stream.
            capture_error_mode: "global", "thread_local" or "relaxed".
            tag: Name that selects the memory for pause and resume, see :meth:`region`.
            enable_cpu_backup: The C++ package's name of ``backup="host"``.
            cpu_backup_backend: "mmap" together with ``enable_cpu_backup`` is ``backup="mmap"``.
            backup: Place in which a pause keeps the pool's contents, as for :meth:`region`.
            host_memory: Use of the backup's host memory after a resume, as for :meth:`region`.
            runs: Whether allocations may share physical handles, see :meth:`region`. Memory that the pool already has is not
                changed.

        Raises:
            InvalidArgumentError: An argument is invalid for :meth:`region`, or is not a graph, a stream or a token.
            InvalidStateError: The token's memory is paused; or, in hook mode "torch", it already holds memory that is not
                managed, or the program has ended routing to a replaced token.
        """
        optional = _changed(
            "cuda_graph", cpu_backup_backend=cpu_backup_backend, backup=backup, host_memory=host_memory, runs=runs
        )
        return self._use().cuda_graph(
            cuda_graph=cuda_graph,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
            tag=tag,
            enable_cpu_backup=enable_cpu_backup,
            **optional,
        )

    def disable(self) -> DecoratingContext:
        """Return a context manager inside which allocations are ordinary, even inside a region.

        Memory that was allocated and freed inside is released to the driver on exit, or by :meth:`empty_cache`.

        Raises:
            InvalidStateError: No region is in force, nor ``TMS_INIT_ENABLE=1``.
        """
        return self._use().disable()

    def bind_region(self, function: _Function) -> _Function:
        """Wrap a function for another thread, so that its allocations belong to the caller's region.

        Use it as in ``Thread(target=bind_region(load))``. A region applies to the thread that enters it and to the calls
        that this thread submits to a ``ThreadPoolExecutor``, for which no pause waits. The wrapper enters a region with the
        options of the innermost one that the caller is in now, for each call and on the thread of the call. It does so even
        if the caller has left its own region by then. Inside :meth:`disable` the wrapper's allocations are ordinary as
        well. Outside of every region the function itself is returned.

        A pause of the tag is refused or waits while a call is running, as for any region.

        Args:
            function: Any callable: a function, a method, a ``functools.partial``. The wrapper passes arguments, result and
                exceptions on.

        Raises:
            InvalidArgumentError: `function` is not a callable. The wrapper raises it if `function` returns a coroutine.
            TypeError: `function` is a coroutine function or a generator function, whose body runs after the call has
                returned.
        """
        return self._use().bind_region(function)

    def manage(self, what: Manageable, *, tag: str = DEFAULT_TAG, backup: _Backup = None) -> ManageHandle:
        """Move tensors that already exist into managed memory, as if a region with the same tag and backup had made them.

        Tensors, parameters and storages stay the same objects: views and tied weights still share their memory, and only
        addresses change. A storage that already lies in memory with this tag and backup is not moved. One with another tag
        or backup is moved. During the call, device memory grows by at most the largest storage and 64 MiB. It grows by more
        where PyTorch cannot release the old memory: PyTorch releases whole segments, which several storages and other
        tensors may share, and it releases nothing while another thread is inside a region.

        Memory that later replaces that of a parameter or buffer is ordinary: after ``module.to(dtype)``, an assignment to
        ``.data``, a merged adapter or a quantisation, call this method again. A pause of the tag logs a warning, once, if
        tensors of a module have left managed memory, and its report counts them (``no_longer_managed_bytes``). The module is
        remembered weakly.

        The call waits for the devices. Meanwhile no other thread may use the tensors. What has the old addresses becomes
        invalid: results of ``data_ptr()``, DLPack capsules, and captured CUDA graphs, which have to be captured again. A
        process that has received a tensor (CUDA IPC) keeps the old memory.

        Args:
            what: Tensors, modules, optimizers, or iterables of them. A tensor stands for its whole storage. A module stands
                for its parameters and buffers, not for gradients. An optimizer stands for its state, not for the parameters;
                until ``remove()`` of the handle, each ``step()`` and ``load_state_dict()`` moves new state after it ran, so
                that temporaries stay outside. A later call for the same optimizer replaces the earlier one. An optimizer
                that wraps others, or another object with a ``step()``, also stands for the optimizers in its attributes
                ``optimizer`` and ``optim``, and in its lists, tuples and dicts. A warning is logged once if the first step
                makes no state. Tensors of modules and optimizers that are on the CPU stay there.
            tag: Name that selects the memory for pause and resume, see :meth:`region`.
            backup: Where a pause keeps the contents, see :meth:`region`.

        Returns:
            A handle with the bytes that were moved.

        Raises:
            InvalidArgumentError: An object is none of these; or a tensor is not a leaf (it has a ``grad_fn``), has no memory
                on a CUDA device, or has memory of a captured graph, of a MemPool of the program, of another process, or
                that PyTorch's CUDA allocator has not made; or an optimizer wraps another one in a way that is not known;
                or a tensor is state of an optimizer whose steps would move it back to the tag of an earlier call. Nothing
                was moved. A ``step()`` raises this error as well, after it has run.
            InvalidStateError: A tensor is saved for a backward that has not run, or is paused with another tag, and nothing
                was moved; or PyTorch's caching is off in hook mode "torch". Saved tensors are found through the tensors with
                a ``grad_fn`` that Python's garbage collector lists. The error names the attribute of a module that holds
                such a tensor: delete that one of the old ``weight_norm`` and ``spectral_norm``, which the next forward makes
                again. Saved tensors are not found if ``gc.freeze()`` has put these aside, if a hook for saved tensors has
                packed them, if they are attributes of a context, or with an old PyTorch (2.11 shows them).
            CaptureInProgressError: A stream capture is active. Nothing was moved. A ``step()`` that is captured moves
                nothing.
            OutOfMemoryError: Memory is short for a storage, which stays where it was. What was moved before stays moved, and
                the same call moves the rest.
            TorchUnavailableError: There is no PyTorch that can use CUDA.
        """
        return self._use().manage(what, **_changed("manage", tag=tag, backup=backup))

    def pause(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        backup: _Backup | Literal["discard"] = None,
        live_only: bool = True,
        progress: Callable[[int, int], Any] | None = None,
        if_shared: Literal["allow", "wait", "refuse"] = "allow",
        timeout: float | None = 10.0,
    ) -> PauseReport:
        """Release the physical memory of resident allocations to the driver after saving contents to their backups.

        The call waits for other threads to leave regions of these tags, and for the devices concerned. During this wait a
        thread inside such a region may enter further regions, and other threads wait before they enter a region of these
        tags. The calling thread itself may be inside such a region. A thread that ended inside a region is no longer in it.

        Memory that is already paused is skipped, except that ``backup="discard"`` drops its backup: a resume then maps the
        memory without contents. Tensors keep their addresses and must not be accessed before the resume. A warning is
        logged, once for each cause, if nothing is managed or if no allocation ever had the tag.

        On the main thread a signal whose handler raises (Ctrl-C) ends the call, with nothing changed, while it waits for the
        devices or copies. At most 512 MiB of copies in flight end first. Once the last copies are in flight or the call
        releases memory, it may complete first.

        An allocation that the driver fails to release is *damaged*: the pause raises, the contents stay in the backup, and
        later calls retry the release. A later pause only logs an allocation that is still damaged.

        Managed segments without a tensor are released to the driver. PyTorch's cache of ordinary memory stays:
        ``torch.cuda.empty_cache()`` releases it. In the other segments, the pause copies only blocks that are in use or that
        a stream may still use. Memory of CUDA graphs, of pools other than those of :meth:`region` and PyTorch's default
        pool, and memory outside PyTorch is copied completely.

        Args:
            tag: One tag or an iterable of tags. None selects every tag. A tag with ``*``, ``?`` or ``[`` that no region or
                allocation has had is a pattern (:mod:`fnmatch`, case-sensitive) for the tags that allocations have had when
                the call begins.
            backup: Where this pause keeps the contents, in place of the choice of the regions: "host", "mmap", "disk" or
                "shared" as for :meth:`region`, or "discard" (nowhere). None applies the choice of the regions. "discard"
                also makes a pause possible if a backup is lost.
            live_only: False copies the free blocks as well.
            progress: Called on this thread with (bytes done, total bytes), a few times a second while contents are copied,
                and once at the end. It must not call pause or resume.
            if_shared: What to do if other processes may still use tensors of this memory that were sent to them. "allow"
                completes the pause, and those processes keep the physical memory, with its contents, until they drop their
                tensors (``possibly_shared_bytes`` of the report). "wait" waits for them until the timeout and then raises.
                "refuse" raises at once.
            timeout: Maximum total wait of the call in seconds: for other threads that are inside a region of the tags, for
                receivers (``if_shared="wait"``), and for other calls with hooks. None does not wait, ``math.inf`` waits
                forever. A signal whose handler raises ends the wait on the main thread.

        Raises:
            InvalidArgumentError: Neither a tag nor an iterable of tags; an unknown ``backup``; ``live_only`` that is not a
                flag; a ``progress`` that is not callable; an unknown ``if_shared``; a ``timeout`` that is negative or not a
                number.
            InvalidStateError: Another thread is still inside a region of one of the tags (the message names both); or this
                thread is already inside a pause or resume (the call comes from a signal handler, a callback or a finaliser);
                or other processes may still use the memory, and ``if_shared`` does not allow that.
            CaptureInProgressError: A stream capture is active.
            OutOfHostMemoryError, BackupIOError: The backups could not be made. Everything stays resident.
            DriverError: The driver failed to release some of the memory. The rest is paused.
            Exception: Raised by ``progress`` or a callback of :meth:`on_pause`. Nothing was changed, unless memory was
                already being released: then the pause is complete.
        """
        optional = _changed(
            "pause", backup=backup, live_only=live_only, progress=progress, if_shared=if_shared, timeout=timeout
        )
        return self._use().pause(tag=tag, **optional)

    @overload
    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: _HostMemory = None,
        zero: bool = False,
        progress: Callable[[int, int], Any] | None = None,
        wait: Literal[True] = True,
    ) -> ResumeReport: ...

    @overload
    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: _HostMemory = None,
        zero: bool = False,
        wait: Literal[False],
    ) -> PendingResume: ...

    @overload
    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: _HostMemory = None,
        zero: bool = False,
        progress: Callable[[int, int], Any] | None = None,
        wait: bool,
    ) -> ResumeReport | PendingResume: ...

    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: _HostMemory = None,
        zero: bool = False,
        progress: Callable[[int, int], Any] | None = None,
        wait: bool = True,
    ) -> ResumeReport | PendingResume:
        """Map new physical memory at the same addresses for paused allocations and restore contents that have a backup.

        If a device has too little free memory, PyTorch's cache in this process is emptied before the resume fails or waits.
        With ``wait=False`` the cache is emptied only at the beginning.

        Args:
            tag: One tag or an iterable of tags. None selects every tag. Patterns are allowed as for :meth:`pause`.
            timeout: Seconds to wait for memory that other processes hold. None does not wait, ``math.inf`` waits forever.
                No memory is allocated before all of it is free. A signal whose handler raises ends the wait.
            exclusive: True to take turns with other processes that also pass it, first come, first served: the call waits
                (as long as ``timeout`` allows) until none of them holds the devices concerned. This process then holds the
                devices until the resumed memory is paused or freed, or until the process ends.
            host_memory: What happens to the host memory of the backups after this resume: see :meth:`region`. None applies
                the setting of the region, or :attr:`host_memory` if the region has none.
            zero: Whether memory that is resumed without contents is zeroed. Otherwise its contents are undefined; with
                :attr:`guard` they are 0xFF.
            progress: Called with (bytes done, total bytes) while contents are copied: see :meth:`pause`.
            wait: False returns a :class:`PendingResume` at once. It resumes what is paused now, and a later pause of these
                tags waits for its end. The memory must not be accessed before its ``wait()`` or ``wait_stream(stream)`` has
                returned; these raise the exceptions. Not together with ``progress``.

        Raises:
            OutOfMemoryError: The device has too little free memory. Everything stays paused, with its backup: free memory
                and call again. The message has the missing bytes, those that PyTorch's cache released, and the device's
                largest holder.
            DeviceLockedError: ``exclusive``, and another process holds a device's lock or is served first. Nothing was
                changed.
            DriverError: Some of the memory is damaged (see :meth:`pause`), and the driver failed again to release it. The
                rest has been resumed. The damaged addresses stay reserved and must not be accessed; call again. If the
                driver's error has its own exception, such as DeviceLostError, that one is raised.
            InvalidArgumentError, CaptureInProgressError, InvalidStateError: The reasons are those of :meth:`pause`, and an
                unknown ``host_memory``.
            Exception: Raised by ``progress`` or a callback of :meth:`on_resume`. Everything stays paused, unless the resume
                was already complete.
        """
        optional = _changed(
            "resume", timeout=timeout, exclusive=exclusive, host_memory=host_memory, zero=zero, progress=progress, wait=wait
        )
        return self._use().resume(tag=tag, **optional)

    @_registers_hooks
    def on_pause(self, tag: Any = None, when: Any = "before", callback: Any = None, *, cancelled: _Cancelled = None) -> Any:
        """Register a callback that is called around every pause of a tag.

        A callback can, for example, deregister buffers whose physical memory the pause releases.

        Before-callbacks are called in the order of registration, after-callbacks in reverse, on the thread of the call, with
        no lock held. Callbacks may allocate and free memory, even inside regions, but must not pause or resume. A callback
        is not called if the pause finds nothing resident with its tag, or is refused because of a capture or of another
        thread's region. Other threads' pauses and resumes of the same tags wait until all callbacks have returned.

        Args:
            tag: One tag or pattern, or an iterable of them, as for :meth:`pause`. None selects every tag. Patterns are
                matched at each call. A tag that is like a known one, and that no allocation ever had, is logged once.
            when: "before" (the default) or "after"; or a :class:`Hook` with the callbacks as methods.
            callback: Called with a :class:`HookCall`. Without it, the result is a decorator, which returns the function
                itself.
            cancelled: Called with the exception, in reverse order, if ``callback`` has returned and the pause then changes
                nothing of these tags: a later callback has raised, or the pause has failed.

        Returns:
            A handle, whose ``remove()`` ends the registration.

        Raises:
            InvalidArgumentError: An argument has the wrong type or value, or a callback is a coroutine function or a
                generator function, whose body a call does not run.
        """
        return _register("pause", tag, when, callback, cancelled)

    @_registers_hooks
    def on_resume(self, tag: Any = None, when: Any = "before", callback: Any = None, *, cancelled: _Cancelled = None) -> Any:
        """Register a callback that is called around every resume of a tag.

        The arguments are those of :meth:`on_pause`.

        A callback is not called if the resume finds nothing paused with its tag. It is called once for a call with
        ``timeout``. With ``wait=False`` the before-callbacks are called before ``resume`` returns. The after-callbacks are
        called once: by :meth:`PendingResume.wait`, by a pause of these tags, which waits for the resume, or by the next
        resume of them. A resume with ``timeout``, ``exclusive`` or ``wait=False`` does not block other threads' calls after
        its before-callbacks have returned.

        Raises:
            InvalidArgumentError: An argument is invalid for :meth:`on_pause`.
        """
        return _register("resume", tag, when, callback, cancelled)

    def preserve(self, *what: Preservable, tag: str | None = None, parameters: bool = False) -> PreserveHandle:
        """Keep the contents of tensors through pauses that drop the contents of the memory around them.

        This is for data that an engine computes only once, in memory without a backup: rope tables, scales, running
        statistics. A pause copies these storages to pinned host memory, and nothing else of that memory. The resume restores
        the storages; the rest of the memory has undefined contents. ``pause(backup="discard")`` drops all contents, and
        every other choice keeps all contents. In memory with a backup, and in memory that is not managed, nothing changes.

        Args:
            what: Tensors, modules, or iterables of them, such as ``state_dict().values()``. A tensor stands for its whole
                storage, so a view, ``p.data`` or ``p.detach()`` is enough. A module stands for all buffers that it and its
                submodules have at the pause. Storages and modules are held weakly: a registration ends when its storage is
                freed. A tensor that gets another storage later (``p.data = ...``) has to be passed again. A later call for
                the same storage or module with the same tag replaces the earlier one.
            tag: Tag of the memory in which storages are preserved. None preserves storages in memory of any tag.
            parameters: Whether the parameters of modules are preserved as well.

        Returns:
            A handle with the blocks that a pause would keep now, whose ``remove()`` ends the registration. A warning is
            logged for tensors that are not in managed memory, and if there is no tensor on a GPU.

        Raises:
            InvalidArgumentError: `what` has an object that is not a tensor or a module, the tag is invalid, or `parameters`
                is not a flag.
        """
        return self._use().preserve(
            what, tag=None if tag is None else check_tag(tag), parameters=check_flag("parameters", parameters)
        )

    def preserved(self, tag: str | Iterable[str] | None = None) -> tuple[PreservedBlock, ...]:
        """Return the blocks that a pause of a tag would keep now because of :meth:`preserve`, by address.

        Args:
            tag: Tag or pattern, or an iterable of tags and patterns. None selects every tag.

        Raises:
            InvalidArgumentError: `tag` is neither a tag nor an iterable of tags.
        """
        return self._use().preserved(tag)

    def check_fresh(
        self,
        tag: _Tag = None,
        *,
        ignore: Ignorable = (),
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        whole: bool = False,
    ) -> FreshReport:
        """Find live memory that a resumed engine has forgotten to restore: nothing has written to it since its resume.

        The method is for debugging and needs :attr:`guard`, turned on before that resume.

        With :attr:`guard`, a resume fills memory that it maps without contents with 0xFF bytes. This method samples a few
        places of each block that was live when the resume began, and reports the blocks that still hold the pattern: by
        tensor, and by where they were allocated if PyTorch's history is recorded
        (:func:`torch_memory_saver.observe.memory.record_history`). Printing the report shows a table. Call this method when
        the engine has finished its own restoration, before it serves requests.

        The method waits for the devices, as a pause does, and changes nothing. While it runs, other threads cannot send this
        memory to other processes. It launches no kernel and copies samples to pinned host memory, some 5 MB for 10 000
        blocks.

        A block that was freed and allocated again since the resume, at the same address and with the same size, counts as
        the old block, because PyTorch cannot tell the two apart.

        Args:
            tag: Tags to check: one tag or pattern, or an iterable of them. None selects every tag.
            ignore: Memory that need not be written yet: tags or patterns, such as "kv_cache", tensors (their whole
                storages), modules (their parameters and buffers), or iterables of these. Memory of ignored tags may be
                paused.
            modules: Modules whose parameters and buffers give names to the blocks found. Modules that Python's garbage
                collector lists are searched anyway, so pass modules only in a process that has called ``gc.freeze()``.
            whole: Whether blocks are read from end to end, in several steps if they are large. This finds memory that the
                samples miss.

        Raises:
            InvalidStateError: Guard mode is off; memory of the tags is not resident; or this thread is inside a pause or
                resume.
            CaptureInProgressError: A stream capture is active. Nothing was changed.
            InvalidArgumentError: `tag` is neither a tag nor an iterable of tags, or `ignore` or `modules` has an object of
                another type.
            OutOfHostMemoryError, DriverError: The samples could not be copied. Nothing was changed.
        """
        return self._use().check_fresh(tag, ignore=ignore, modules=modules, whole=whole)

    def empty_cache(self) -> None:
        """Release cached GPU memory inside a region or :meth:`disable`, where ``torch.cuda.empty_cache()`` cannot.

        Outside of regions ``torch.cuda.empty_cache()`` is enough, because it releases idle managed memory as well. Where
        other processes need the memory, call :func:`torch_memory_saver.observe.memory.release_cached`, which also collects
        garbage.

        Call this method between the layers that a region loads or converts: PyTorch cannot reuse the memory of deleted
        tensors for larger ones while it allocates in a region, or in :meth:`disable`. Idle segments of a pool that holds
        tensors are released if they are larger than what this strands (``stats().stranded_bytes``).

        While another thread is inside a region, memory that PyTorch caches outside of regions on its device is released
        when that thread leaves; this is logged once. The method does nothing if torch is not in use.
        """
        self._use().empty_cache()

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return the host copy of a managed tensor as a CPU tensor of its dtype and shape, or None if there is none now.

        There is a copy while the tensor is paused, if its region or the pause has a backup. The contents of a backup on disk
        are read into new memory, once no pause or resume is running. So a checkpoint can be written while everything is
        paused. Contents that are read from a disk are checked. A damaged object of the shared store is found by a resume
        only, on the GPU.

        After a resume there is one, with the contents at the pause, only with ``host_memory="retain"`` or
        :attr:`retain_cpu_backup`, and only until a region with the same tag and options is entered. From then on a tensor
        may have the place of a deleted one, which PyTorch does not report. The next pause makes the copy again. For the same
        reason there is none after a resume of memory that not only regions allocate from: PyTorch's own pool
        (``TMS_INIT_ENABLE``), pools of CUDA graphs, and memory of other libraries.

        A tensor that contains tensors, such as a DTensor or one of data and scales, gives a tensor of the same class made of
        their host copies, and None if one of them has none. So a parked, sharded trainer can write its checkpoint.

        There is no copy of memory that was not copied completely (free blocks of PyTorch's cache). A pause that fails or is
        interrupted leaves a retained copy unchanged, unless it had begun to overwrite the copy: then there is none until the
        next pause, which makes it at the same address.

        Args:
            x: A contiguous CUDA tensor, or one whose class names the tensors that it is made of (``__tensor_flatten__``).
            zero_copy: Whether the result is the backup's own memory rather than a copy of it, if the backup is in host
                memory, and the tensor in one piece of an expandable segment. The memory stays valid while the result lives.
                You may write to it, so the next pause copies everything.
                Later pauses may write to it, and a pause that fails half-way leaves a mixture there. A forked child does not
                inherit this memory and gets SIGSEGV when it accesses the memory: copy it before the fork.

        Raises:
            NotManagedError: The tensor is not in managed memory.
            InvalidArgumentError: `x` is not a tensor, is not contiguous, or is nested.
            BackupIOError: The file of a backup on disk cannot be read, or was changed.
            CaptureInProgressError, InvalidStateError: A backup on disk cannot be read while a capture is active, nor by a
                thread that is inside a pause or resume.
        """
        return self._use().get_cpu_backup(x, zero_copy=zero_copy)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Set the directory for disk backups from now on.

        The directory is created if it is missing; its parents must exist. The default is ``TMS_DISK_BACKUP_DIR``, or else
        the system's temporary directory.

        Raises:
            InvalidArgumentError: `path` is not a path.
            BackupIOError: The directory cannot be created or written to. The former one stays in use.
        """
        self._use().set_disk_backup_dir(path)

    def reserve_host_memory(self, bytes: int, device: int | torch.device | None = None) -> None:
        """Prepare pinned host memory for later backups in the background.

        The first pause is then as fast as the later ones.

        The memory belongs to the pool of ``host_memory="pool"``, whose limit is raised to `bytes` if it is less. Memory
        already in the pool counts. :meth:`stats` reports its size (``host_pooled_bytes``).

        Args:
            bytes: The total for all devices.
            device: The device that uses it; None is the current one. Backups of other devices can use it as well.

        Raises:
            OutOfHostMemoryError: `bytes` exceeds the available memory, a limit of a container or
                ``TMS_HOST_MEMORY_LIMIT_MB``. Nothing was changed. A later failure is logged as a warning.
            InvalidArgumentError: `bytes` is not a number of bytes, or `device` is not a device.
        """
        self._use().reserve_host_memory(bytes, device)

    def release_host_memory(self) -> None:
        """Release idle host memory of the pool, in the background; for GPU memory call :meth:`empty_cache`.

        This undoes ``host_memory="pool"`` and :meth:`reserve_host_memory`. Memory of backups and the pool's limit stay.
        """
        self._use().release_host_memory()

    def enable_peer_access(self) -> None:
        """Make managed memory accessible to every device that this process uses.

        The call may be needed in hook mode "torch" after the process has begun to use another device, if no region was
        entered or left since then. It is needed in three cases: with PyTorch before 2.10, if the program makes MemPools of
        its own, or if PyTorch has allocated nothing on that device.
        """
        self._use().enable_peer_access()

    def stats(self, tag: str | Iterable[str] | None = None, device: int | torch.device | None = None) -> Stats:
        """Return the use of managed memory now, by tag, by device and by allocation, with peaks, totals and counters.

        The totals cover the pauses and resumes so far. ``print(stats())`` shows a table.

        This method may be called at any time. While another thread pauses or resumes, its allocations are "pausing" or
        "resuming". The method takes a short lock, waits for no device and makes no driver call. Once a pool is retired, it
        also reads PyTorch's list of segments to compute ``stranded_bytes``.

        Args:
            tag: One tag or pattern, or an iterable of them, to restrict the result to their allocations. None selects every
                tag.
            device: Device, such as a CUDA ordinal, to restrict the result to its allocations. None selects every device.

        Raises:
            InvalidArgumentError: `tag` is neither a tag nor an iterable of tags, or `device` is not a device.
        """
        with errors_of("stats"):
            tags, ordinal = select_tags(tag), _selected_device(device)
        return self._use().stats(tags, ordinal)

    def ledger(self, device: int | torch.device | None = None, *, measure_context: bool = False) -> Ledger:
        """Return who holds the memory of each device now, in lines that add up to the used bytes that the driver reports.

        The lines are managed memory, PyTorch's other memory, other libraries, the context, other processes, and memory that
        is not attributed. ``print(ledger())`` shows tables.

        This method may be called at any time, including in the handler of an out-of-memory error, during a capture, and
        while another thread pauses or resumes. Without `measure_context` it allocates no device memory, waits for no device
        and starts no process.

        Args:
            device: Device, such as a CUDA ordinal. None selects every device on which this process has a context.
            measure_context: Whether to measure the size of a context in a child process if NVML does not report how much
                memory this process holds.

        Raises:
            InvalidArgumentError: `device` is not a device.
            InvalidStateError: This process has no context on the device, or this installation has no ledger.
            DriverError: The driver fails, or the child process cannot make a context.
        """
        with errors_of("ledger"):
            ordinal = _selected_device(device)
        return self._use().ledger(ordinal, measure_context)

    def reset_peaks(self) -> None:
        """Set each ``resident_peak_bytes`` to the bytes that are mapped now."""
        self._use().reset_peaks()

    def is_paused(self, x: torch.Tensor) -> bool:
        """Return whether any of a tensor's storage is in managed memory that is not resident: an access would be an error.

        Such memory is paused, being paused or resumed, or damaged (see :meth:`pause`). A copy from or to it fails with
        "invalid argument". A kernel that accesses it causes an illegal memory access, after which the process can no longer
        use the device. The method accepts tensors on any device and any view. Tensors in other memory, for instance on the
        CPU, are never paused. A tensor made of other tensors (``DTensor``) is paused if any of these is paused.

        Raises:
            InvalidArgumentError: The argument is not a tensor, or is a tensor without a storage of its own, such as a sparse
                tensor: pass its parts.
        """
        return is_paused(x)

    def tag_of(self, x: torch.Tensor) -> str | None:
        """Return the tag of the memory that holds a tensor, paused or not, or None if the memory is not managed.

        The memory of a CPU tensor, for example, is not managed. For a tensor made of other tensors (a subclass), the method
        returns the tag of the first one that has a tag, and for memory in several allocations (an expandable segment) that
        of the first one.

        Raises:
            InvalidArgumentError: The argument is invalid for :meth:`is_paused`.
        """
        return tag_of(x)

    def patches(self) -> tuple[Patch, ...]:
        """Return what this package has replaced in other packages in this process, such as functions of PyTorch.

        The page *What the package changes* lists everything that may be replaced, and the other effects on a process. The
        operators of the simulated GPU are not included.
        """
        return patches_in_force()


#: The methods of the class, whichever a program puts in their place later.
_METHODS = dict(vars(TorchMemorySaver))


@functools.cache
def _defaults_of(method: str) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(_METHODS[method]).parameters.items()}


def _changed(method: str, **options: Any) -> dict[str, Any]:
    """Return the options that differ from the defaults of a method.

    The others are omitted because a program may have installed an implementation that does not accept them.

    Only values of the default's own type are compared, because the comparison of other objects may return or raise anything.
    The check of the option reports such objects.
    """
    defaults = _defaults_of(method)
    return {
        name: value
        for name, value in options.items()
        if value is not defaults[name] and (type(value) is not type(defaults[name]) or value != defaults[name])
    }


def _selected_device(device: object) -> int | None:
    """Return the ordinal of a device, or None for every device. A ``torch.device`` without an ordinal is the current one."""
    if device is None:
        return None
    ordinal, torch = check_device(device), layer.in_use()
    if ordinal >= 0:
        return ordinal
    return 0 if torch is None else torch.current_device()


def _register(operation: str, tag: _Tag, when: Any, callback: Any, cancelled: _Cancelled) -> Any:
    if callback is not None or not isinstance(when, str):
        return hooks.register(operation, tag, when, callback, cancelled)
    with errors_of(f"on_{operation}"):
        tags = check_tags(tag)  # an iterator can be read only once

    def decorate(function: _Callback) -> _Callback:
        hooks.register(operation, tags, when, function, cancelled)
        return function

    return decorate


def forward_settings(module: ModuleType, saver: TorchMemorySaver) -> None:
    """Give a module a property for each setting of the saver."""
    names = [name for name, value in vars(TorchMemorySaver).items() if isinstance(value, property)]
    properties = {name: _forwarded(saver, name) for name in names}
    module.__class__ = type("_ModuleWithSettings", (type(module),), {"__doc__": module.__doc__, **properties})


def _forwarded(saver: TorchMemorySaver, name: str) -> property:
    """Return the property of a module for one setting.

    Setting a read-only one raises the error of the saver's own property.
    """

    def read(module: ModuleType) -> Any:
        return getattr(saver, name)

    def write(module: ModuleType, value: Any) -> None:
        setattr(saver, name, value)

    return property(read, write, doc=getattr(TorchMemorySaver, name).__doc__)


#: The one saver of this process.
torch_memory_saver = TorchMemorySaver()


def _saver_of_this_process() -> TorchMemorySaver:
    return torch_memory_saver
