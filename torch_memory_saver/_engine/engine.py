"""The engine: what each public method does, in order. The saver creates one at its first use.

A call is spelled three times: the public method (saver.py), the engine's, and the native core's. The engine's methods take
the public arguments by keyword, because a program may register another engine (hook_modes.py). Engines share the pools of
the process (process.py). Engines hold no lock.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch_memory_saver import _core
from torch_memory_saver._additions import added
from torch_memory_saver._engine import preload
from torch_memory_saver._engine.background import after_call, before_pause, explain, start_from_environment
from torch_memory_saver._engine.calls.hook_calls import begin_with_hooks, refuse_inner_call, with_hooks
from torch_memory_saver._engine.calls.pending import PendingResume, on_main_thread
from torch_memory_saver._engine.calls.silent_mistakes import warn_of_empty_pause, warn_of_receivers, warn_of_unknown_tags
from torch_memory_saver._engine.hook_modes import DecoratingContext, check_hook_mode
from torch_memory_saver._engine.native_log import passes_log_on
from torch_memory_saver._engine.preparation import (
    check_before_pause,
    check_before_resume,
    core_arguments,
    current_stream,
    prepare_pools,
    prepare_resume,
    settle_pause,
)
from torch_memory_saver._engine.process import (
    blas_workspaces,
    graph_pools,
    install_sharing,
    managed_modules,
    pending_resumes,
    pool_store,
    preserved,
    resumed_blocks,
    shared_memory,
)
from torch_memory_saver._engine.region import Region, bind_region
from torch_memory_saver._engine.tensors.freshness import Checked, check_fresh
from torch_memory_saver._engine.tensors.lookup import get_cpu_backup
from torch_memory_saver._engine.tensors.preserved import PreserveHandle
from torch_memory_saver._engine.thread_pools import follow_thread_pools
from torch_memory_saver._engine.variables import init_enabled, warn_of_unknown_variables
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.history import may_have_native_frames
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.graphs.cuda_graph import GraphCapture, check_token
from torch_memory_saver._torch.memory.default_pool import DefaultPool
from torch_memory_saver._torch.memory.live_blocks import managed_blocks
from torch_memory_saver._torch.memory.resume_preparation import make_room, with_room
from torch_memory_saver._torch.records.tags import selects
from torch_memory_saver._torch.sharing.ipc import check_importer
from torch_memory_saver.errors import (
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    TorchMemorySaverError,
    rename_operation,
)
from torch_memory_saver.options import (
    DEFAULT_TAG,
    HOST_MEMORY,
    PauseOptions,
    RegionOptions,
    ResumeOptions,
    check_bytes,
    check_device,
    check_flag,
    check_switch,
    choose_host_policy,
    select_tags,
)
from torch_memory_saver.reports.freshness import FreshReport
from torch_memory_saver.reports.ledger import Ledger
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport, pause_report, resume_report
from torch_memory_saver.reports.usage import PreservedBlock, Stats, take_stats

if TYPE_CHECKING:
    from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle

__all__ = [
    "Engine",
    "check_capture",
    "check_path",
    "check_reservation",
    "options_of_region",
]

logger = logging.getLogger("torch_memory_saver")

_CAPTURE_MODES = ("global", "thread_local", "relaxed")

#: :meth:`RegionOptions.check`, which remembers what it has accepted: programs enter the regions of a few tags many times.
_known_options = functools.lru_cache(maxsize=1024, typed=True)(RegionOptions.check)


def options_of_region(*arguments: Any) -> RegionOptions:
    """Return the checked options of a region, from the arguments of :meth:`RegionOptions.check`."""
    try:
        return _known_options(*arguments)
    except TypeError:  # an argument has no hash: its check says what is wrong with it
        pass
    return RegionOptions.check(*arguments)


def check_capture(
    cuda_graph: Any, pool: Any, stream: Any, capture_error_mode: object
) -> tuple[TorchCuda, tuple[int, int] | None]:
    """Check the arguments of ``torch.cuda.graph``. Return PyTorch's layer, and the pool's token or None.

    Raises:
        InvalidArgumentError: One of them is invalid.
    """
    if capture_error_mode not in _CAPTURE_MODES:
        raise InvalidArgumentError(f"capture_error_mode must be one of {_CAPTURE_MODES}, not {capture_error_mode!r}")
    token = check_token(pool)
    torch = layer.require()
    if not isinstance(cuda_graph, torch.torch.cuda.CUDAGraph):
        raise InvalidArgumentError(f"cuda_graph must be a torch.cuda.CUDAGraph, not {type(cuda_graph).__name__}")
    if stream is not None and not isinstance(stream, torch.torch.cuda.Stream):
        raise InvalidArgumentError(f"stream must be None or a torch.cuda.Stream, not {type(stream).__name__}")
    return torch, token


def check_path(path: object) -> str:
    """Return a path as an absolute text.

    Raises:
        InvalidArgumentError: It is not a path.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"path must be a non-empty str or path object, not {path!r}")
    return os.path.abspath(text)


def check_reservation(bytes: object, device: object) -> tuple[int, int]:
    """Return a size, and the ordinal of a device or -1 for the current one.

    Raises:
        InvalidArgumentError: One of them is invalid.
    """
    size, ordinal = check_bytes("bytes", bytes), check_device(device)
    if ordinal >= 0 and ordinal >= _core.device_count():
        raise InvalidArgumentError(f"device must be below {_core.device_count()}, but is {ordinal}")
    return size, ordinal


@functools.cache
def _close_at_exit() -> None:
    """Make sure that no thread of the native core calls the driver during the process's exit.

    Only in the main interpreter: handlers of :mod:`atexit` also run at the end of a sub-interpreter.
    """
    if _core.main_interpreter:
        atexit.register(_core.close)


class _CppPackageAttribute:
    """A private attribute that programs know from the C++ package, from _compat/cpp_package.py. A program may replace it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Engine | None, owner: type) -> Any:
        for find in added("private attribute").values() if engine is not None else ():
            return find(engine, self._name)
        raise AttributeError(f"{owner.__name__!r} has no attribute {self._name!r}")


class Engine:
    """The engine of the built-in hook modes. Its creation fixes the hook mode.

    Args:
        hook_mode: "auto", "preload" or "torch".

    Raises:
        InvalidArgumentError: An unknown hook mode.
        InvalidStateError: "preload" without the preload library.
    """

    _affected_devices = _CppPackageAttribute()
    _binary_wrapper = _CppPackageAttribute()
    _hook_mode = _CppPackageAttribute()
    _hook_util = _CppPackageAttribute()
    _mem_pools = _CppPackageAttribute()
    _with_region_config = _CppPackageAttribute()

    def __init__(self, hook_mode: str = "auto") -> None:
        warn_of_unknown_variables()
        preload.warn_of_another_package()
        preload.warn_of_ignored_library()
        self.hook_mode = preload.resolve_hook_mode(check_hook_mode(hook_mode))
        _close_at_exit()
        self._find_torch: Callable[[], TorchCuda | None] = layer.loaded if _core.preloaded else layer.require
        self._store = pool_store
        self._graph_pools = graph_pools
        self._default_pool = DefaultPool(pool_store.substitutes)
        self._manages_everything = _core.preloaded and init_enabled()
        torch = layer.imported()
        if torch is not None:  # with TMS_INIT_ENABLE tensors may be sent before this package uses torch.cuda
            install_sharing(torch)
        if self._manages_everything:
            self._graph_pools.default_pool_managed = True
        if init_enabled() and not _core.preloaded:
            logger.warning(
                "TMS_INIT_ENABLE is set, but this process was started without the preload library: only regions are "
                "managed; start it with LD_PRELOAD=%s",
                preload.library_path(),
            )
        start_from_environment()

    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
        *,
        backup: str | None = None,
        host_memory: str | None = None,
        runs: bool = True,
        threads: bool = True,
    ) -> DecoratingContext:
        options = options_of_region(
            tag, backup, host_memory, runs, enable_cpu_backup, enable_disk_backup, cpu_backup_backend, threads
        )
        return self._region(options, threads)

    def _region(self, options: RegionOptions, threads: bool = True) -> Region:
        follow_thread_pools(self._store, self._find_torch, self._manages_everything)
        return Region(self._store, self._find_torch, options, threads)

    def disable(self) -> DecoratingContext:
        current = _core.region_current()
        if not current.managed and current.depth == 0 and not self._manages_everything:
            raise InvalidStateError(
                "disable() has nothing to switch off: use it inside a region, or in a process with TMS_INIT_ENABLE=1",
                operation="disable",
            )
        return self._region(RegionOptions.disabled(current.tag))

    def bind_region(self, function: Any) -> Any:
        return bind_region(self._store, self._find_torch, function)

    @passes_log_on
    def manage(self, what: Any, *, tag: str = DEFAULT_TAG, backup: str | None = None) -> ManageHandle:
        from torch_memory_saver._engine.tensors.managed_tensors import manage  # few programs need it

        return manage(self._store, managed_modules, what, RegionOptions.check(tag, backup, operation="manage"))

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
        *,
        backup: str | None = None,
        host_memory: str | None = None,
        runs: bool = True,
    ) -> DecoratingContext:
        options = RegionOptions.check(
            tag, backup, host_memory, runs, enable_cpu_backup, False, cpu_backup_backend, operation="cuda_graph"
        )
        torch, token = check_capture(cuda_graph, pool, stream, capture_error_mode)
        return GraphCapture(
            self._store,
            self._graph_pools,
            blas_workspaces,
            torch,
            cuda_graph,
            token,
            stream,
            capture_error_mode,
            options,
        )

    @passes_log_on
    def pause(
        self,
        tag: Any = None,
        **given: Any,
    ) -> PauseReport:
        options = PauseOptions.check(tag, **given)
        settle_pause(options)
        return with_hooks("pause", options, check_before_pause, self._pause)

    def _pause(self, options: PauseOptions) -> PauseReport:
        """Run the native pause, between the preparation of receivers and of PyTorch's pools and their treatment after it."""
        torch = layer.in_use()
        before_pause.run(options.tags)
        try:
            with shared_memory.awaited(options) as shared:
                self._empty_cache_of_managed_memory(torch)
                with prepare_pools(torch, options) as leave_paused_pools:
                    reusable = self._prepare_default_pool(torch, options)
                    epochs = _pause_epochs(options)
                    try:
                        done = _core.pause(options.tags, current_stream(torch), **core_arguments(torch, options))
                    except BaseException:
                        if _pause_epochs(options) != epochs:  # It has failed after its commit point.
                            leave_paused_pools()
                        raise
                    if done.allocations:
                        leave_paused_pools()
                    self._default_pool.warn_once(reusable)
            left = 0 if torch is None else managed_modules.left_bytes(torch.torch, options.tags)
        finally:
            after_call.run()
        unknown = warn_of_unknown_tags("pause", options.tags) if done.unknown_tags else ""
        discards = not done.allocations and options.backup == _core.BACKUP_NONE and _has_paused(options)
        note = unknown or ("memory that was paused already has no backup any more" if discards else "")
        report = pause_report(done, note, reusable, shared, left)
        _warn_after_pause(torch, report)
        return report

    def _empty_cache_of_managed_memory(self, torch: TorchCuda | None) -> None:
        """Empty PyTorch's cache if all memory is managed, so that a pause keeps nothing of it."""
        if torch is not None and self._manages_everything and not _core.counters()["visible_captures"]:
            self._store.empty_torch_cache(torch)

    def _prepare_default_pool(self, torch: TorchCuda | None, options: PauseOptions) -> int:
        """Prepare PyTorch's default pool for a pause, if it is managed. Return the bytes in it that could be reused."""
        if torch is None or not self._graph_pools.default_pool_managed:
            return 0
        return self._default_pool.prepare(torch, options.tags)

    @passes_log_on
    def resume(
        self,
        tag: Any = None,
        **given: Any,
    ) -> ResumeReport | PendingResume:
        options = ResumeOptions.check(tag, **given)
        refuse_inner_call("resume")
        pending_resumes.see_ended(options.tags)
        if not options.wait:
            return begin_with_hooks("resume", options, check_before_resume, self._begin_resume, pending_resumes.add)
        return with_hooks("resume", options, check_before_resume, self._resume)

    def _begin_resume(self, options: ResumeOptions, begun: list[_core.Pending]) -> None:
        torch = prepare_resume(options)
        make_room(self._store, torch, options.tags)
        begin = functools.partial(_core.resume_begin, options.tags, current_stream(torch), **options.core_now)
        _core.record_each(begun, begin, [()])
        warn_of_unknown_tags("resume", options.tags)

    def _resume(self, options: ResumeOptions) -> ResumeReport:
        torch = prepare_resume(options)

        def resume(options: ResumeOptions) -> _core.Report:
            return _core.resume(options.tags, current_stream(torch), interruptible=on_main_thread(), **options.core_now)

        try:
            done = with_room(self._store, torch, options.tags, lambda: resume(options), lambda: resume(options.at_once()))
        except OutOfMemoryError as error:
            explain(error, options.tags)
            raise
        finally:
            after_call.run()
        return resume_report(done, warn_of_unknown_tags("resume", options.tags) if done.unknown_tags else "")

    def preserve(self, what: Iterable[Any], *, tag: str | None, parameters: bool) -> PreserveHandle:
        return preserved.add(what, tag, parameters)

    def preserved(self, tag: Any = None) -> tuple[PreservedBlock, ...]:
        tags = select_tags(tag)
        warn_of_unknown_tags("preserved", tags)
        return tuple(block for block in preserved.blocks(None) if selects(tags, block.tag))

    @passes_log_on
    def check_fresh(self, tag: Any = None, *, ignore: Any = (), modules: Any = (), whole: bool = False) -> FreshReport:
        checked = Checked.check(tag, ignore, modules, whole)
        refuse_inner_call("check_fresh")
        warn_of_unknown_tags("check_fresh", checked.tags)
        torch = layer.in_use()
        return check_fresh(
            checked, current_stream(torch), lambda rows: managed_blocks(torch, self._store, resumed_blocks, rows)
        )

    @passes_log_on
    def empty_cache(self) -> None:
        torch = layer.in_use()
        shared_memory.collect()
        if torch is not None:
            self._store.empty_cache(torch)
            self._store.regions.room.forget_empty_tags()
            self._store.log_deferred_emptying()

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        torch, flag = layer.in_use(), check_flag("zero_copy", zero_copy, none=True)
        return get_cpu_backup(
            x, flag, lambda row: torch is not None and self._store.idle_pools.has_tensors_of_last_pause(torch, row)
        )

    @passes_log_on
    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        _core.set_disk_directory(check_path(path))

    @passes_log_on
    def reserve_host_memory(self, bytes: int, device: Any = None) -> None:
        _core.reserve_host_memory(*check_reservation(bytes, device))

    @passes_log_on
    def release_host_memory(self) -> None:
        _core.release_host_memory()

    @passes_log_on
    def enable_peer_access(self) -> None:
        _core.refresh_peers()

    def stats(self, tags: tuple[str, ...] | None, device: int | None) -> Stats:
        warn_of_unknown_tags("stats", tags)
        torch = layer.in_use()
        is_known = torch is not None and not may_have_native_frames(torch.torch)
        return take_stats(
            tags, device, self._store.idle_pools.stranded_bytes(torch) if torch is not None and is_known else 0
        )

    def ledger(self, device: int | None, measure_context: bool) -> Ledger:
        check_flag("measure_context", measure_context)
        take = added("ledger").get("ledger")
        if take is None:
            raise InvalidStateError("this installation has no ledger: its folder is missing", operation="ledger")
        try:
            ledger: Ledger = take(device, measure_context)
        except TorchMemorySaverError as error:
            rename_operation(error, "ledger")
            raise
        return ledger

    def reset_peaks(self) -> None:
        _core.reset_peaks()

    @property
    def share_for(self) -> str | None:
        return shared_memory.importer

    @share_for.setter
    def share_for(self, value: str | None) -> None:
        shared_memory.importer = check_importer(value)

    @property
    def memory_margin_bytes(self) -> int:
        return _core.get_memory_margin()

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        _core.set_memory_margin(check_bytes("memory_margin_bytes", value))

    @property
    def retain_cpu_backup(self) -> bool:
        return _core.get_retain_backup()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        _core.set_retain_backup(check_flag("retain_cpu_backup", value, none=True))

    @property
    def guard(self) -> bool:
        return _core.get_guard()

    @guard.setter
    def guard(self, value: bool) -> None:
        _core.set_guard(check_switch("guard", value))

    @property
    def host_memory(self) -> str:
        policy = _core.get_host_policy()
        return next((name for name, number in HOST_MEMORY.items() if number == policy), "release")

    @host_memory.setter
    def host_memory(self, value: str) -> None:
        if value is None:
            raise InvalidArgumentError('host_memory must be "release", "pool" or "retain", not None')
        _core.set_host_policy(choose_host_policy(value))


def _settle_substitutes() -> None:
    torch = layer.in_use()
    if torch is not None:
        pool_store.substitutes.settle(torch)


after_call.add("the end of the pools that replace PyTorch's default pool", _settle_substitutes)


def _has_paused(options: PauseOptions) -> bool:
    """Return whether memory of the tags is paused."""
    return any(row.state != _core.STATE_ACTIVE and selects(options.tags, row.tag) for row in _core.segments())


def _pause_epochs(options: PauseOptions) -> dict[str, int]:
    """Return the number of pauses that have changed memory of each tag."""
    return {tag: _core.tag_info(tag).epoch for tag in (_core.tags() if options.tags is None else options.tags)}


def _warn_after_pause(torch: TorchCuda | None, report: PauseReport) -> None:
    """Warn of what a pause may have missed."""
    if report.possibly_shared_bytes:
        shared_memory.collect()
        warn_of_receivers(report.possibly_shared_bytes)
    if not report.allocations:
        warn_of_empty_pause(torch)
