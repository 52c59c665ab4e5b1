"""The engine of a process in which ``TMS_DISABLE`` is set: it checks arguments and does nothing else.

The saver chooses it in place of every hook mode. The native core has read the variable, manages no allocation, and its
interposers only call the real functions; ``layer`` replaces nothing in PyTorch. So this engine only answers calls, with
context managers that only enter and leave, and with reports of zeros. Callbacks of pauses and resumes are not called,
because nothing is paused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch_memory_saver._engine import preload
from torch_memory_saver._engine.calls.pending import PendingResume, handle_of
from torch_memory_saver._engine.engine import Engine, check_capture, check_path, check_reservation, options_of_region
from torch_memory_saver._engine.hook_modes import DecoratingContext
from torch_memory_saver._engine.process import graph_pools, pool_store
from torch_memory_saver._engine.region import check_bound
from torch_memory_saver._engine.tensors.freshness import Checked
from torch_memory_saver._engine.tensors.lookup import get_cpu_backup
from torch_memory_saver._engine.tensors.preserved import PreserveHandle, objects_in
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.records.frames import FunctionDecorator
from torch_memory_saver.errors import NotManagedError
from torch_memory_saver.options import (
    DEFAULT_TAG,
    PauseOptions,
    RegionOptions,
    ResumeOptions,
    check_flag,
    select_tags,
)
from torch_memory_saver.reports.freshness import FreshReport
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport
from torch_memory_saver.reports.usage import PreservedBlock, Stats, take_stats

if TYPE_CHECKING:
    from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle

__all__ = ["DisabledEngine"]


class _Nothing(FunctionDecorator):
    """A context manager that can be used like a region, and has no effect."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


class _EndedResume(PendingResume):
    """A resume of nothing, which has ended."""

    def __init__(self) -> None:
        pass

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> ResumeReport:
        return ResumeReport()

    def wait_stream(self, stream: Any = None) -> None:
        handle_of(stream)


class DisabledEngine(Engine):
    """The engine that does nothing. Settings can be set and read as usual."""

    def __init__(self) -> None:
        self.hook_mode = preload.mode_in_force()
        # For private attributes of the C++ package, see private_attribute_of().
        self._find_torch = layer.loaded
        self._store = pool_store
        self._graph_pools = graph_pools

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
        options_of_region(tag, backup, host_memory, runs, enable_cpu_backup, enable_disk_backup, cpu_backup_backend, threads)
        return _Nothing()

    def disable(self) -> DecoratingContext:
        return _Nothing()

    def bind_region(self, function: Any) -> Any:
        check_bound(function)
        return function

    def manage(self, what: Any, *, tag: str = DEFAULT_TAG, backup: str | None = None) -> ManageHandle:
        from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle
        from torch_memory_saver._engine.tensors.movable import find_movable, flat

        RegionOptions.check(tag, backup, operation="manage")
        torch = layer.require().torch
        find_movable(torch, flat(torch, what))
        return ManageHandle()

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
        RegionOptions.check(
            tag, backup, host_memory, runs, enable_cpu_backup, False, cpu_backup_backend, operation="cuda_graph"
        )
        torch, token = check_capture(cuda_graph, pool, stream, capture_error_mode)
        graph: DecoratingContext = torch.torch.cuda.graph(
            cuda_graph, pool=token, stream=stream, capture_error_mode=capture_error_mode
        )
        return graph

    def pause(
        self,
        tag: Any = None,
        **given: Any,
    ) -> PauseReport:
        PauseOptions.check(tag, **given)
        return PauseReport()

    def resume(
        self,
        tag: Any = None,
        **given: Any,
    ) -> ResumeReport | PendingResume:
        options = ResumeOptions.check(tag, **given)
        return ResumeReport() if options.wait else _EndedResume()

    def preserve(self, what: Iterable[Any], *, tag: str | None, parameters: bool) -> PreserveHandle:
        objects_in("preserve", what)
        return PreserveHandle((), lambda: None)

    def preserved(self, tag: Any = None) -> tuple[PreservedBlock, ...]:
        select_tags(tag)
        return ()

    def check_fresh(self, tag: Any = None, *, ignore: Any = (), modules: Any = (), whole: bool = False) -> FreshReport:
        return FreshReport(whole=Checked.check(tag, ignore, modules, whole).whole)

    def empty_cache(self) -> None:
        torch = layer.in_use()
        if torch is not None:
            torch.empty_cache()

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        with contextlib.suppress(NotManagedError):  # it checks the tensor first
            get_cpu_backup(x, check_flag("zero_copy", zero_copy, none=True), lambda row: False)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        check_path(path)

    def reserve_host_memory(self, bytes: int, device: Any = None) -> None:
        check_reservation(bytes, device)

    def release_host_memory(self) -> None:
        return None

    def enable_peer_access(self) -> None:
        return None

    def stats(self, tags: tuple[str, ...] | None, device: int | None) -> Stats:
        return take_stats(tags, device, 0)
