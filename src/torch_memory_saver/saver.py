"""The public surface: :class:`TorchMemorySaver`, whose one object is ``torch_memory_saver.torch_memory_saver``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

from torch_memory_saver import hook_modes, preload
from torch_memory_saver.arguments import DEFAULT_TAG
from torch_memory_saver.eager import eager_methods
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.implementation import Implementation
from torch_memory_saver.paused import is_paused
from torch_memory_saver.pending import PendingResume
from torch_memory_saver.report import PauseReport, ResumeReport
from torch_memory_saver.settings import suggestion
from torch_memory_saver.usage import Stats

if TYPE_CHECKING:
    import torch

__all__ = ["TorchMemorySaver"]


@eager_methods
class TorchMemorySaver:
    """Pauses and resumes GPU memory without changing its addresses.

    Nothing happens before the first use: no driver is loaded and no device touched. All sizes are bytes. Every method may be
    called from any thread; a region is about the thread that enters it. Failures are exceptions of
    :mod:`torch_memory_saver.errors`, each of which leaves things as they were before the call, except where the driver
    refuses to take memory back: see :meth:`pause` and :meth:`resume`.
    """

    def __init__(self) -> None:
        # Programs in the field rely on both names: they look for the implementation and put another one in.
        self._impl: Any = None
        self._impl_ctor_kwargs: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses names that nothing reads; those of a leading underscore are for programs that reach inside."""
        if not name.startswith("_") and not hasattr(type(self), name):
            settable = [key for key, kind in vars(TorchMemorySaver).items() if isinstance(kind, property) and kind.fset]
            raise AttributeError(f"torch_memory_saver has no setting {name!r}{suggestion(name, settable)}")
        super().__setattr__(name, value)

    def _ensure_initialized(self) -> None:
        """Makes the implementation at the first use."""
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
        """How allocations are caught: "preload" or "torch"; "auto", the default, until the first use decides.

        "preload" where the process was started with the preload library (see :func:`configure_subprocess`): allocations of
        every library are managed inside regions. "torch" otherwise: those that PyTorch makes. It may be set before the first
        use, to "preload" in order to insist on it, or to a name given to :func:`register_hook_mode`. "torch" in a preloaded
        process changes nothing.

        Raises:
            InvalidArgumentError: Set to an unknown mode.
            InvalidStateError: Set after the first use to a mode that is not in force.
        """
        if self._impl is None:
            return self._impl_ctor_kwargs.get("hook_mode", "auto")
        # Programs that put an implementation in may delete the arguments of ours.
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

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Child processes started inside get the preload library; ``LD_PRELOAD`` is as before afterwards.

        Other entries of ``LD_PRELOAD`` are kept. Changes this process's environment meanwhile, and so for every thread of
        it. Does nothing where :attr:`hook_mode` is a registered mode without preloading.

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
        host_memory: str | None = None,
    ) -> AbstractContextManager[None]:
        """A context manager: what this thread allocates on GPUs inside can be paused and resumed.

        Regions nest, the innermost counts. Tensors made outside stay ordinary. While the tag is paused a region of it may be
        entered: what is allocated then is resident.

        A ``backward()`` inside runs on this thread and not on PyTorch's own, so that its gradients are managed, too. What
        other threads allocate is not.

        Args:
            tag: A name for pause and resume to select by; any non-empty str.
            enable_cpu_backup: A pause keeps the contents in host memory. Without a backup contents are lost at a pause.
            enable_disk_backup: A pause keeps the contents in a file (see :meth:`set_disk_backup_dir`).
            cpu_backup_backend: "pinned" (page-locked memory: fast) or "mmap" (goes back to the system at the resume).
            host_memory: What becomes of the backup's host memory after a resume: "release" (back to the system), "pool"
                (kept, page-locked, for any later backup) or "retain" (kept with its contents, for the next pause and for
                :meth:`get_cpu_backup`). None: as :attr:`host_memory` says then.

        Raises:
            InvalidArgumentError: Both backups, an unknown backend, a backend without ``enable_cpu_backup``, a bad tag, an
                unknown ``host_memory``.
            TorchUnavailableError: Hook mode "torch" and no PyTorch that can use CUDA.
        """
        optional: dict[str, Any] = {}
        if enable_disk_backup:
            optional["enable_disk_backup"] = enable_disk_backup
        if cpu_backup_backend is not None:
            optional["cpu_backup_backend"] = cpu_backup_backend
        if host_memory is not None:
            optional["host_memory"] = host_memory
        manager: AbstractContextManager[None] = self._use().region(tag=tag, enable_cpu_backup=enable_cpu_backup, **optional)
        return manager

    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
        host_memory: str | None = None,
    ) -> AbstractContextManager[None]:
        """Like ``torch.cuda.graph``; the memory that the graph allocates can be paused and resumed.

        Args:
            cuda_graph: The graph to capture into.
            pool: A token from ``torch.cuda.graph_pool_handle()``, another graph's ``pool()`` or a ``MemPool``'s ``id``:
                graphs captured here with the same token, tag and backup share one managed pool. In preload mode, and where
                a ``MemPool`` has our allocator, it is the token's own; otherwise a managed one takes its place. None: a pool
                of the graph's own.
            stream: The stream to capture on; None is torch's capture stream.
            capture_error_mode: "global", "thread_local" or "relaxed".
            tag, enable_cpu_backup, cpu_backup_backend, host_memory: As for :meth:`region`.

        Raises:
            InvalidArgumentError: As for :meth:`region`, or something that is not a graph or a token.
            InvalidStateError: The token's memory is paused; or, in hook mode "torch", it already holds memory that is not
                managed, or the program has ended routing to a token that had been replaced.
        """
        optional: dict[str, Any] = {} if cpu_backup_backend is None else {"cpu_backup_backend": cpu_backup_backend}
        if host_memory is not None:
            optional["host_memory"] = host_memory
        manager: AbstractContextManager[None] = self._use().cuda_graph(
            cuda_graph=cuda_graph,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
            tag=tag,
            enable_cpu_backup=enable_cpu_backup,
            **optional,
        )
        return manager

    def disable(self) -> AbstractContextManager[None]:
        """A context manager: allocations inside are ordinary, although a region surrounds them.

        What was allocated inside and deleted is the driver's again on exit.

        Raises:
            InvalidStateError: No region is in force, nor ``TMS_INIT_ENABLE=1``.
        """
        manager: AbstractContextManager[None] = self._use().disable()
        return manager

    def pause(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        backup: str | None = None,
        live_only: bool = True,
        progress: Callable[[int, int], Any] | None = None,
    ) -> PauseReport:
        """Gives the physical memory of what is resident back to the driver, contents to their backups first.

        Waits for the devices concerned. What is paused already is skipped; a tag that nobody used is a warning in the log.
        Tensors keep their addresses and must not be touched before the resume.

        On the main thread a signal whose handler raises (Ctrl-C) ends the call within a second, with nothing changed, while
        it waits for the devices or copies. Once memory goes back, the call completes first.

        What the driver does not take back is *damaged*: its contents are in its backup, and later calls try again. The pause
        that it happens to fails; a later one that meets it still damaged says so in the log only.

        Of what PyTorch caches, segments that hold no tensor go back to the driver, and of the others only the blocks are
        copied that hold something, or that a stream still uses. Copied whole is the memory of CUDA graphs and of other pools
        than those of :meth:`region` and PyTorch's own, and what PyTorch does not know of.

        Args:
            tag: A tag, several, or None for every tag.
            backup: Where contents go this time, whatever the regions said: "host" (host memory), "disk" (a file) or
                "discard" (nowhere). None: as they said.
            live_only: False copies the free blocks as well.
            progress: Called with (bytes done, bytes in all) while contents are copied, some times a second at most, and once
                when that is done, on this thread. It must not call pause or resume.

        Raises:
            InvalidArgumentError: Not a tag, nor an iterable of tags; an unknown ``backup``; a ``progress`` that cannot be
                called.
            InvalidStateError: Another thread is inside a region of one of the tags; or the call comes from inside a pause or
                resume of this thread, from a signal handler or a finaliser.
            CaptureInProgressError: A stream capture is under way.
            OutOfHostMemoryError, BackupIOError: The backups could not be made. Everything is still resident.
            DriverError: The driver refused to take some of the memory back. The rest is paused.
            Exception: What ``progress`` raised. Nothing was changed, or, if memory went back already, the pause is done.
        """
        optional: dict[str, Any] = {}
        if backup is not None:
            optional["backup"] = backup
        if not live_only:
            optional["live_only"] = live_only
        if progress is not None:
            optional["progress"] = progress
        report: PauseReport = self._use().pause(tag=tag, **optional)
        return report

    @overload
    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: str | None = None,
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
        host_memory: str | None = None,
        zero: bool = False,
        wait: Literal[False],
    ) -> PendingResume: ...

    def resume(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        exclusive: bool = False,
        host_memory: str | None = None,
        zero: bool = False,
        progress: Callable[[int, int], Any] | None = None,
        wait: bool = True,
    ) -> ResumeReport | PendingResume:
        """Gives what is paused new physical memory at the same addresses, with its contents if it has a backup.

        Where a device has too little free memory, and PyTorch only caches some of it in this process, that cache is emptied
        before the resume fails or waits; with ``wait=False`` at the beginning only.

        Args:
            tag: A tag, several, or None for every tag.
            timeout: Seconds to wait while others hold the memory; None does not wait, ``math.inf`` does for ever. The memory
                is taken when all of it is there, and none of it before. A signal whose handler raises ends the wait.
            exclusive: Take turns with other processes that do the same: the call waits (as long as ``timeout`` allows) until
                none of them holds the devices concerned. This process then holds them until what the call has resumed is
                paused or freed, or until it ends.
            host_memory: What becomes of the host memory of the backups this time: see :meth:`region`. None: as the regions
                said, or else :attr:`host_memory`.
            zero: Memory that comes back without contents is zeroed. Otherwise it holds anything.
            progress: Called with (bytes done, bytes in all) while contents are copied: see :meth:`pause`.
            wait: False returns at once, with a :class:`PendingResume`, whose ``wait()`` and ``wait_stream(stream)`` say when
                the memory may be touched; exceptions are raised there. Without ``progress``.

        Raises:
            OutOfMemoryError: The device has too little free memory. What was paused still is, with its backup: make room and
                call again. The message says how much is missing, and what PyTorch's cache gave.
            DeviceLockedError: ``exclusive``, and another process holds a device's lock. Nothing was changed.
            DriverError: Some of it is damaged (see :meth:`pause`), and the driver, asked again, has refused again. The rest
                has been resumed and stays so. The damaged addresses stay reserved and must not be touched; call again. Where
                the driver's answer has an exception of its own, such as DeviceLostError, that one is raised.
            InvalidArgumentError, CaptureInProgressError, InvalidStateError: As for :meth:`pause`, and for an unknown
                ``host_memory``.
            Exception: What ``progress`` raised. What was paused still is, unless everything had come back already.
        """
        optional: dict[str, Any] = {}
        if timeout is not None:
            optional["timeout"] = timeout
        if exclusive:
            optional["exclusive"] = exclusive
        if host_memory is not None:
            optional["host_memory"] = host_memory
        if zero:
            optional["zero"] = zero
        if progress is not None:
            optional["progress"] = progress
        if not wait:
            optional["wait"] = wait
        result: ResumeReport | PendingResume = self._use().resume(tag=tag, **optional)
        return result

    def empty_cache(self) -> None:
        """Like ``torch.cuda.empty_cache()``, for managed memory as well and also inside regions.

        Memory on a device on which another thread is inside a region goes back when that thread leaves it. Without torch
        nothing is cached and nothing happens.
        """
        self._use().empty_cache()

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """The host copy of a managed tensor: a CPU tensor of its dtype and shape; None if there is none now.

        There is one while the tensor is paused, if its region had a CPU backup; after a resume only with
        ``host_memory="retain"`` or :attr:`retain_cpu_backup`. There is none of memory that was not copied as a whole: free
        blocks of PyTorch's. A pause that fails or is interrupted leaves a retained copy as it was, unless it had begun to
        write the new contents over it: that one is gone until the next pause, which makes it at the same address.

        Args:
            x: A contiguous CUDA tensor.
            zero_copy: The result is the backup's own memory rather than a copy of it. It stays valid for as long as the
                result lives; later pauses may write to it, and one that fails half-way leaves a mixture there. A forked
                child does not inherit this memory and gets SIGSEGV where it touches it: copy it before the fork.

        Raises:
            NotManagedError: The tensor is not in managed memory.
            InvalidArgumentError: Not a tensor, or one that is not contiguous.
        """
        backup: torch.Tensor | None = self._use().get_cpu_backup(x, zero_copy=zero_copy)
        return backup

    def is_paused(self, x: torch.Tensor) -> bool:
        """Whether touching a tensor would be an error now: its storage lies in managed memory that is not resident.

        That is memory which is paused, being paused or resumed, or damaged (see :meth:`pause`). A copy from or to it fails
        with "invalid argument". A kernel that touches it is an illegal memory access, after which the process cannot use the
        device any more. Any device, any view; tensors of other memory, on the CPU for instance, are never paused. Of a
        tensor that is made of others (``DTensor``) each counts.

        Raises:
            InvalidArgumentError: Not a tensor, or one without a storage of its own, such as a sparse one: ask for its parts.
        """
        return is_paused(x)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """The directory for disk backups from now on, made if it is not there; those above it must be. Default:
        ``TMS_DISK_BACKUP_DIR``, else the system's temporary directory.

        Raises:
            InvalidArgumentError: Not a path.
            BackupIOError: The directory cannot be made or written to. The one in use stays.
        """
        self._use().set_disk_backup_dir(path)

    def reserve_host_memory(self, bytes: int, device: int | torch.device | None = None) -> None:
        """Has page-locked host memory made ready for later backups, in the background, so that the first pause is as fast as
        the later ones.

        It belongs to the pool that ``host_memory="pool"`` feeds, whose limit is raised to `bytes` where it is less. What the
        pool holds already counts. :meth:`stats` tells how much there is (``host_pooled_bytes``).

        Args:
            bytes: How much, of all devices together.
            device: The device that it is for; None is the current one. Backups of others can use it, too.

        Raises:
            OutOfHostMemoryError: It is more than the system, a limit of a container or ``TMS_HOST_MEMORY_LIMIT_MB`` leaves.
                Nothing was changed. What shows later only is a warning in the log.
            InvalidArgumentError: Not a number of bytes, or not a device.
        """
        self._use().reserve_host_memory(bytes, device)

    def release_host_memory(self) -> None:
        """Gives the host memory back that the pool holds and nobody uses, in the background: the way back from
        ``host_memory="pool"`` and :meth:`reserve_host_memory`. What backups lie in stays, and so does the pool's limit."""
        self._use().release_host_memory()

    def enable_peer_access(self) -> None:
        """Makes managed memory accessible to every device that this process uses by now. Needed in hook mode "torch" after
        the process has begun to use another device, if no region was entered or left since."""
        self._use().enable_peer_access()

    def stats(self) -> Stats:
        """What is managed now: bytes by tag, every allocation, and the counters."""
        stats: Stats = self._use().stats()
        return stats

    @property
    def memory_margin_bytes(self) -> int:
        """A managed allocation that would leave less free memory on its device than this fails as out of memory. Default 0.

        Raises:
            InvalidArgumentError: Set to something that is not a number of bytes.
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
    def host_memory(self) -> str:
        """What becomes of host memory after a resume, where neither the call nor the region says: "release" (back to the
        system; the default), "pool" (kept, page-locked, for any later backup) or "retain" (kept with its contents).

        The environment sets it (``TMS_HOST_MEMORY``), and limits: ``TMS_HOST_MEMORY_LIMIT_MB`` is the most that backups and
        the pool may have together, in MiB; ``TMS_HOST_POOL_LIMIT_MB`` is what the pool keeps. What a container allows and
        what the system has available are limits anyway.

        Raises:
            InvalidArgumentError: Set to something else.
        """
        return str(self._use().host_memory)

    @host_memory.setter
    def host_memory(self, value: str) -> None:
        self._use().host_memory = value
