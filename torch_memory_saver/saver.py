"""The public class :class:`TorchMemorySaver`. Its one instance is ``torch_memory_saver.torch_memory_saver``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch_memory_saver._saver import hook_modes, preload
from torch_memory_saver._saver.arguments import DEFAULT_TAG, PAUSE_TIMEOUT_S, check_flag
from torch_memory_saver._saver.first_use import given
from torch_memory_saver._saver.fresh_methods import FreshMethods
from torch_memory_saver._saver.hook_methods import HookMethods
from torch_memory_saver._saver.preserve_methods import PreserveMethods
from torch_memory_saver._saver.state_methods import StateMethods
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.pending import PendingResume
from torch_memory_saver.report import PauseReport, ResumeReport

if TYPE_CHECKING:
    import torch

__all__ = ["TorchMemorySaver"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _saver_of_this_process() -> TorchMemorySaver:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


@eager_methods
class TorchMemorySaver(HookMethods, PreserveMethods, FreshMethods, StateMethods):
    """Pauses and resumes GPU memory without changing its addresses.

    No driver is loaded and no device used before the first use. All sizes are bytes. Every method may be called from any
    thread; a region applies to the thread that enters it. Failures are exceptions of :mod:`torch_memory_saver.errors`. A
    failed call changes nothing, except where the driver fails to release memory: see :meth:`pause` and :meth:`resume`.

    A process has one saver. Copies of it are the object itself, and unpickling it in another process gives the saver of that
    process.
    """

    def __reduce__(self) -> tuple[Callable[[], TorchMemorySaver], tuple[()]]:
        """Pickle the saver as the one of the process that unpickles it."""
        return _saver_of_this_process, ()

    def __copy__(self) -> TorchMemorySaver:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchMemorySaver:
        return self

    def configure_subprocess(self, ledger: bool = False) -> AbstractContextManager[None]:
        """Child processes started inside load the preload library; ``LD_PRELOAD`` is restored afterwards.

        Other entries of ``LD_PRELOAD`` are kept. Changes the environment of this process meanwhile, for all its threads.
        Does nothing if :attr:`hook_mode` is a registered mode without preloading.

        Args:
            ledger: In the child processes :meth:`ledger` also counts libraries that look up the driver's functions
                themselves, as NCCL does: their preload library stands before ``dlsym`` as well, and ``TMS_LEDGER`` is 1.

        Raises:
            InvalidArgumentError: ``ledger`` is not a bool.
            InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
        """
        ledger = check_flag("ledger", ledger)
        if hook_modes.uses_preload(self.hook_mode):
            return preload.configure_subprocess(ledger)
        return nullcontext()

    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
        host_memory: str | None = None,
        runs: bool = True,
    ) -> AbstractContextManager[None]:
        """A context manager: GPU memory that this thread allocates inside can be paused and resumed.

        Regions nest, and the innermost applies. Tensors made outside stay ordinary. A region may be entered while its tag is
        paused: new allocations are resident.

        A ``backward()`` inside runs on this thread and not on PyTorch's own, so that its gradients are managed as well.
        Allocations of other threads are not.

        Args:
            tag: The name by which pause and resume select; any non-empty str. It is never a pattern.
            enable_cpu_backup: A pause keeps the contents in host memory. Without a backup a pause discards them.
            enable_disk_backup: A pause keeps the contents in a file (see :meth:`set_disk_backup_dir`).
            cpu_backup_backend: "pinned" (pinned memory, fast) or "mmap" (pageable memory, released at the resume).
            host_memory: What happens to the backup's host memory after a resume: "release" (released to the system), "pool"
                (kept, pinned, for any later backup) or "retain" (kept with its contents, for the next pause and for
                :meth:`get_cpu_backup`). None: :attr:`host_memory` at that time.
            runs: Whether a resume may back neighbouring allocations by one large physical handle, which is faster. With
                False each allocation keeps a handle of its own, so that a free always returns its memory at once. Use
                False for tags of which a part is freed between a resume and the next pause, and for tags whose memory is
                shared with other processes.

        Raises:
            InvalidArgumentError: Both backups, a flag that is neither a bool nor 0, 1 or None, an unknown backend, a backend
                without ``enable_cpu_backup``, an invalid tag, an unknown ``host_memory``, ``runs`` that is not a bool.
            TorchUnavailableError: Hook mode "torch" and no PyTorch that can use CUDA.
        """
        optional = given(
            enable_disk_backup=(enable_disk_backup, False),
            cpu_backup_backend=(cpu_backup_backend, None),
            host_memory=(host_memory, None),
        )
        if runs is not True:  # 1 is refused
            optional["runs"] = runs
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
        runs: bool = True,
    ) -> AbstractContextManager[None]:
        """Like ``torch.cuda.graph``, but the memory that the graph allocates can be paused and resumed.

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
            tag: As for :meth:`region`, like the next three.
            enable_cpu_backup: The pool's contents are kept.
            cpu_backup_backend: Where they are kept.
            host_memory: What happens to that memory after a resume.
            runs: As for :meth:`region`. Memory that the pool has already stays as it was made.

        Raises:
            InvalidArgumentError: As for :meth:`region`, or something that is not a graph, a stream or a token.
            InvalidStateError: The token's memory is paused; or, in hook mode "torch", it already holds memory that is not
                managed, or the program has ended routing to a replaced token.
        """
        optional = given(cpu_backup_backend=(cpu_backup_backend, None), host_memory=(host_memory, None))
        if runs is not True:
            optional["runs"] = runs
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
        """A context manager: allocations inside are ordinary, even inside a region.

        Memory that was allocated and freed inside is released to the driver on exit.

        Raises:
            InvalidStateError: No region is in force, nor ``TMS_INIT_ENABLE=1``.
        """
        manager: AbstractContextManager[None] = self._use().disable()
        return manager

    def bind_region(self, function: _Function) -> _Function:
        """Wrap a function that another thread is to run, so that what it allocates belongs to the caller's region:
        ``pool.map(bind_region(load), shards)``.

        A region applies only to the thread that enters it. The wrapper enters a region with the options of the innermost one
        that the caller is in now, for each call and on the thread of the call. It does so also when the caller has left its
        own region meanwhile. Inside :meth:`disable` the wrapper's allocations are ordinary as well. Outside of every region
        the function itself is returned.

        A pause of the tag is refused or waits while a call is running, as for any region.

        Args:
            function: Any callable: a function, a method, a ``functools.partial``. The wrapper passes arguments, result and
                exceptions on.

        Raises:
            InvalidArgumentError: Not a callable.
            TypeError: A coroutine function or a generator function: its body runs after the call has returned.
        """
        bound: _Function = self._use().bind_region(function)
        return bound

    def pause(
        self,
        tag: str | Iterable[str] | None = None,
        *,
        backup: str | None = None,
        live_only: bool = True,
        progress: Callable[[int, int], Any] | None = None,
        if_shared: Literal["allow", "wait", "refuse"] = "allow",
        timeout: float | None = PAUSE_TIMEOUT_S,
    ) -> PauseReport:
        """Releases the physical memory of resident allocations to the driver, after contents were saved to their backups.

        Waits for other threads to leave regions of these tags, and for the devices concerned. Meanwhile threads inside may
        enter further regions, and other threads wait before they enter one of these tags. The calling thread may be inside
        one itself. A thread that ended inside a region is no longer in it.

        Skips memory that is paused already, except that ``backup="discard"`` gives up its backup: a resume then brings it
        back without contents. Tensors keep their addresses and must not be accessed before the resume. A warning is logged,
        once for each cause, if nothing is managed or if no allocation ever had the tag.

        On the main thread a signal whose handler raises (Ctrl-C) ends the call within a second, with nothing changed, while
        it waits for the devices or copies. Once it releases memory, the call completes first.

        An allocation that the driver fails to release is *damaged*: its contents are in its backup, and later calls retry
        the release. That pause fails. A later pause only logs an allocation that is still damaged.

        Segments of PyTorch's cache without a tensor are released to the driver. Of the other segments, only blocks that are
        in use, or that a stream may still use, are copied. Memory of CUDA graphs, of pools other than those of
        :meth:`region` and PyTorch's default pool, and memory outside PyTorch is copied completely.

        Args:
            tag: A tag, several, or None for every tag. A tag with ``*``, ``?`` or ``[`` that no region or allocation has had
                is a pattern (:mod:`fnmatch`, case-sensitive), for the tags that allocations have had when the call begins.
            backup: Overrides the backup of the regions for this pause: "host" (host memory), "disk" (a file) or "discard"
                (nowhere). None: the backups of the regions. "discard" is also the way out if a backup is lost.
            live_only: False copies the free blocks as well.
            progress: Called on this thread with (bytes done, total bytes), a few times a second while contents are copied,
                and once at the end. It must not call pause or resume.
            if_shared: What to do if other processes may still use tensors of this memory that were sent to them. "allow":
                the pause completes; they keep the physical memory, with its contents, until they drop their tensors
                (``possibly_shared_bytes`` of the report). "wait": waits for them until the timeout. "refuse": an error, like
                "wait" after its timeout.
            timeout: Seconds of all waiting of the call: for other threads that are inside a region of the tags, for
                receivers (``if_shared="wait"``), and for other calls with hooks. None does not wait, ``math.inf`` waits for
                ever. A signal whose handler raises ends the wait on the main thread.

        Raises:
            InvalidArgumentError: Neither a tag nor an iterable of tags; an unknown ``backup``; ``live_only`` that is not a
                flag; a ``progress`` that is not callable; an unknown ``if_shared``; a ``timeout`` that is negative or not a
                number.
            InvalidStateError: Another thread is still inside a region of one of the tags (the message names both); or this
                thread is already inside a pause or resume (the call comes from a signal handler, a callback or a finaliser);
                or other processes may still use the memory, and ``if_shared`` does not allow that.
            CaptureInProgressError: A stream capture is active.
            OutOfHostMemoryError, BackupIOError: The backups could not be made. Everything stays resident. DriverError: The
            driver failed to release some of the memory. The rest is paused. Exception: Raised by ``progress`` or a callback
            of :meth:`on_pause`. Nothing was changed, unless memory was already being released: then the pause is complete.
        """
        optional = given(
            backup=(backup, None),
            live_only=(live_only, True),
            progress=(progress, None),
            if_shared=(if_shared, "allow"),
            timeout=(timeout, PAUSE_TIMEOUT_S),
        )
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
        """Maps new physical memory at the same addresses for paused allocations, and restores contents that have a backup.

        If a device has too little free memory, PyTorch's cache in this process is emptied before the resume fails or waits;
        with ``wait=False`` only at the beginning.

        Args:
            tag: A tag, several, or None for every tag; patterns as for :meth:`pause`.
            timeout: Seconds to wait for memory that other processes hold; None does not wait, ``math.inf`` waits for ever.
                No memory is allocated before all of it is free. A signal whose handler raises ends the wait.
            exclusive: Take turns with other processes that do the same: the call waits (as long as ``timeout`` allows) until
                none of them holds the devices concerned. This process then holds them until the resumed memory is paused or
                freed, or until it ends.
            host_memory: What happens to the host memory of the backups after this resume: see :meth:`region`. None: the
                setting of the region, else :attr:`host_memory`.
            zero: Memory that is resumed without contents is zeroed. Otherwise its contents are undefined; with :attr:`guard`
                they are 0xFF.
            progress: Called with (bytes done, bytes in all) while contents are copied: see :meth:`pause`.
            wait: False returns a :class:`PendingResume` at once. It resumes what is paused now, and a later pause of these
                tags waits for its end. The memory must not be accessed before its ``wait()`` or ``wait_stream(stream)`` has
                returned; these raise the exceptions. Not together with ``progress``.

        Raises:
            OutOfMemoryError: The device has too little free memory. Everything stays paused, with its backup: free memory
                and call again. The message has the missing bytes, those that PyTorch's cache released, and the device's
                largest holder.
            DeviceLockedError: ``exclusive``, and another process holds a device's lock. Nothing was changed.
            DriverError: Some of the memory is damaged (see :meth:`pause`), and the driver failed again to release it. The
                rest has been resumed. The damaged addresses stay reserved and must not be accessed; call again. If the
                driver's error has its own exception, such as DeviceLostError, that one is raised.
            InvalidArgumentError, CaptureInProgressError, InvalidStateError: As for :meth:`pause`, and for an unknown
                ``host_memory``.
            Exception: Raised by ``progress`` or a callback of :meth:`on_resume`. Everything stays paused, unless the resume
                was already complete.
        """
        optional = given(
            timeout=(timeout, None),
            exclusive=(exclusive, False),
            host_memory=(host_memory, None),
            zero=(zero, False),
            progress=(progress, None),
            wait=(wait, True),
        )
        result: ResumeReport | PendingResume = self._use().resume(tag=tag, **optional)
        return result

    def empty_cache(self) -> None:
        """Release cached memory, like ``torch.cuda.empty_cache()``, also managed memory and inside regions.

        Call it between the layers that a region loads or converts: PyTorch cannot reuse the memory of deleted tensors for
        larger ones while it allocates in a region. Idle segments of a pool that holds tensors are released if they are
        larger than what this strands (``stats().stranded_bytes``).

        While another thread is inside a region, memory that PyTorch caches outside of regions on its device is released
        when that thread leaves; this is logged once. Does nothing without torch.
        """
        self._use().empty_cache()

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """The host copy of a managed tensor: a CPU tensor of its dtype and shape; None if there is none now.

        There is one while the tensor is paused, if its region or the pause has a backup; after a resume only with
        ``host_memory="retain"`` or :attr:`retain_cpu_backup`. From a backup on disk the contents are read into new memory,
        once no pause or resume is running. So a checkpoint can be written while everything is paused.

        There is none for memory that was not copied completely (free blocks of PyTorch's cache). A pause that fails or is
        interrupted leaves a retained copy unchanged, unless it had begun to overwrite it: then there is none until the next
        pause, which makes it at the same address.

        Args:
            x: A contiguous CUDA tensor.
            zero_copy: The result is the backup's own memory rather than a copy of it, if the backup is in host memory. It
                stays valid while the result lives. Later pauses may write to it, and one that fails half-way leaves a
                mixture there. A forked child does not inherit this memory and gets SIGSEGV when it accesses it: copy it
                before the fork.

        Raises:
            NotManagedError: The tensor is not in managed memory.
            InvalidArgumentError: Not a tensor, or one that is not contiguous.
            BackupIOError: The file of a backup on disk cannot be read, or was changed.
            CaptureInProgressError, InvalidStateError: A backup on disk cannot be read while a capture is active, nor by a
                thread that is inside a pause or resume.
        """
        backup: torch.Tensor | None = self._use().get_cpu_backup(x, zero_copy=zero_copy)
        return backup

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Sets the directory for disk backups from now on. It is created if missing; its parents must exist. Default:
        ``TMS_DISK_BACKUP_DIR``, else the system's temporary directory.

        Raises:
            InvalidArgumentError: Not a path.
            BackupIOError: The directory cannot be created or written to. The former one stays in use.
        """
        self._use().set_disk_backup_dir(path)

    def reserve_host_memory(self, bytes: int, device: int | torch.device | None = None) -> None:
        """Prepares pinned host memory for later backups, in the background, so that the first pause is as fast as
        the later ones.

        The memory belongs to the pool of ``host_memory="pool"``, whose limit is raised to `bytes` if it is less. Memory
        already in the pool counts. :meth:`stats` reports its size (``host_pooled_bytes``).

        Args:
            bytes: The total for all devices.
            device: The device that uses it; None is the current one. Backups of other devices can use it as well.

        Raises:
            OutOfHostMemoryError: It exceeds the available memory, a limit of a container or ``TMS_HOST_MEMORY_LIMIT_MB``.
                Nothing was changed. A later failure is logged as a warning.
            InvalidArgumentError: Not a number of bytes, or not a device.
        """
        self._use().reserve_host_memory(bytes, device)

    def release_host_memory(self) -> None:
        """Releases the idle host memory of the pool, in the background. Undoes ``host_memory="pool"`` and
        :meth:`reserve_host_memory`. Memory of backups and the pool's limit stay."""
        self._use().release_host_memory()

    def enable_peer_access(self) -> None:
        """Makes managed memory accessible to every device that this process uses. Needed in hook mode "torch" after the
        process has begun to use another device, unless a region was entered or left since: with PyTorch before 2.10, if the
        program makes MemPools of its own, or if PyTorch has allocated nothing on that device."""
        self._use().enable_peer_access()
