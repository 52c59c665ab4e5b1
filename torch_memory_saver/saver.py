"""The public surface: :class:`TorchMemorySaver`, whose one object is ``torch_memory_saver.torch_memory_saver``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

from torch_memory_saver._saver import hook_modes, preload
from torch_memory_saver._saver.arguments import DEFAULT_TAG
from torch_memory_saver._saver.first_use import UsedAtFirstCall
from torch_memory_saver._saver.paused import is_paused
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.pending import PendingResume
from torch_memory_saver.report import PauseReport, ResumeReport
from torch_memory_saver.usage import Stats

if TYPE_CHECKING:
    import torch

__all__ = ["TorchMemorySaver"]


@eager_methods
class TorchMemorySaver(UsedAtFirstCall):
    """Pauses and resumes GPU memory without changing its addresses.

    Nothing happens before the first use: no driver is loaded and no device used. All sizes are bytes. Every method may be
    called from any thread; a region applies to the thread that enters it. Failures are exceptions of
    :mod:`torch_memory_saver.errors`. A failed call changes nothing, except where the driver fails to release memory: see
    :meth:`pause` and :meth:`resume`.
    """

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
            cpu_backup_backend: "pinned" (pinned memory: fast) or "mmap" (ordinary memory, released at the resume).
            host_memory: What becomes of the backup's host memory after a resume: "release" (back to the system), "pool"
                (kept, pinned, for any later backup) or "retain" (kept with its contents, for the next pause and for
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
            tag: As for :meth:`region`, and so are the next three.
            enable_cpu_backup: The pool's contents are kept.
            cpu_backup_backend: Where they are kept.
            host_memory: What becomes of that memory after a resume.

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

        Waits for the devices concerned. What is paused already is skipped; an unused tag is a warning in the log.
        Tensors keep their addresses and must not be accessed before the resume.

        On the main thread a signal whose handler raises (Ctrl-C) ends the call within a second, with nothing changed, while
        it waits for the devices or copies. Once memory goes back, the call completes first.

        An allocation that the driver fails to release is *damaged*: its contents are in its backup, and later calls try
        again. That pause fails. A later pause that finds it still damaged only logs it.

        Of what PyTorch caches, segments that hold no tensor go back to the driver, and of the others only the blocks are
        copied that hold something, or that a stream still uses. Copied whole is the memory of CUDA graphs and of other pools
        than those of :meth:`region` and PyTorch's own, and what PyTorch does not know of.

        Args:
            tag: A tag, several, or None for every tag.
            backup: Where contents go this time, whatever the regions were given: "host" (host memory), "disk" (a file) or
                "discard" (nowhere). None: as the regions were given.
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
                were given, or else :attr:`host_memory`.
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
        """Prepares pinned host memory for later backups, in the background, so that the first pause is as fast as
        the later ones.

        It belongs to the pool that ``host_memory="pool"`` feeds, whose limit is raised to `bytes` where it is less. What the
        pool holds already counts. :meth:`stats` reports how much there is (``host_pooled_bytes``).

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
        """Releases the idle host memory of the pool, in the background. It undoes ``host_memory="pool"`` and
        :meth:`reserve_host_memory`. The memory of backups stays, and so does the pool's limit."""
        self._use().release_host_memory()

    def enable_peer_access(self) -> None:
        """Makes managed memory accessible to every device that this process uses by now. Needed in hook mode "torch" after
        the process has begun to use another device, if no region was entered or left since."""
        self._use().enable_peer_access()

    def stats(self) -> Stats:
        """What is managed now: bytes by tag, every allocation, and the counters."""
        stats: Stats = self._use().stats()
        return stats
