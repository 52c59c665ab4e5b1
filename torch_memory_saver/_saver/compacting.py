"""compact(): returns the slack of runs to the driver while the program goes on with the same memory.

The native core pauses the allocations that share a run with slack, keeps their contents in pinned host memory, and resumes
them. So a compaction has the rules of a pause: no thread is inside a region of the tags elsewhere, segments without a tensor
are released first (which makes slack of them where they lie in runs), and only live bytes are copied. It differs in what
comes after: the memory is resident again when the call returns.

The order: the idle segments, which decide whether there is slack; the hooks (hook_calls.py); then, with regions of other
threads kept out, what the hooks have made idle, and the native call. Nothing is held across callbacks but the turn among
calls with hooks. Any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from torch_memory_saver import _core
from torch_memory_saver._out_of_memory.reporter import reporter
from torch_memory_saver._saver import native
from torch_memory_saver._saver.background import after_call
from torch_memory_saver._saver.hook_calls import has_inherited_memory, with_hooks
from torch_memory_saver._saver.importers import importers_awaited
from torch_memory_saver._saver.options import PauseOptions
from torch_memory_saver._saver.slack import slack_by_place
from torch_memory_saver._torch import layer
from torch_memory_saver._torch.layer import TorchCuda
from torch_memory_saver._torch.live import live_finder
from torch_memory_saver._torch.pausing import may_not_free, pausing, refuse_regions_of_others
from torch_memory_saver._torch.pools import PoolStore, Tags, selects
from torch_memory_saver._torch.shared_memory import SharedMemory
from torch_memory_saver.errors import OutOfMemoryError
from torch_memory_saver.report import CompactReport, compact_report

__all__ = ["Compaction"]

_OPERATION = "compact"


class Compaction:
    """One call of compact().

    Args:
        store: The pools of regions.
        shared_memory: What was sent to other processes.
        options: Those of a pause with a backup in host memory.
        manages_everything: PyTorch's default pool is managed.
    """

    def __init__(
        self, store: PoolStore, shared_memory: SharedMemory, options: PauseOptions, manages_everything: bool
    ) -> None:
        self._store = store
        self._shared_memory = shared_memory
        self._options = options
        self._manages_everything = manages_everything

    def run(self) -> CompactReport:
        """
        Raises:
            TorchMemorySaverError: As :meth:`TorchMemorySaver.compact` says.
        """
        with self._prepared(layer.in_use()):
            pass  # what PyTorch only caches is slack now, and counts for the hooks
        return with_hooks(_OPERATION, self._options.tags, self._check, self._compact)

    def _check(self) -> None:
        """Raises what the call is known to fail with."""
        native.refuse_early(_core.compact, layer.in_use(), has_inherited_memory())
        refuse_regions_of_others(self._store, self._options.tags, _OPERATION)

    def _compact(self) -> CompactReport:
        options = self._options
        with_slack = dataclasses.replace(options, tags=tuple({tag for tag, _ in slack_by_place(options.tags)}))
        try:
            with importers_awaited(self._shared_memory, with_slack, _OPERATION) as shared:
                done = self._call_core()
        except OutOfMemoryError as error:
            reporter.explain(error, options.tags)
            raise
        finally:
            after_call.run()
        if shared:
            self._shared_memory.collect()
        return compact_report(done, shared)

    def _call_core(self) -> _core.Report:
        torch, options = layer.in_use(), self._options
        with self._prepared(torch) as leave_paused_pools:
            find_live = live_finder(torch, self._store, options.tags, every_backup=True) if options.asks_for_live else None
            try:
                return native.compact(options, None if torch is None else torch.current_stream(), find_live)
            except BaseException:
                if _any_paused(options.tags):  # the second half has failed
                    leave_paused_pools()
                raise

    @contextlib.contextmanager
    def _prepared(self, torch: TorchCuda | None) -> Iterator[Callable[[], None]]:
        """Inside, PyTorch has released what it only caches, and other threads wait with entering regions of the tags."""
        if torch is not None and self._manages_everything and not may_not_free(torch):
            self._store.empty_torch_cache(torch)
        with pausing(self._store, torch, self._options.tags, _OPERATION) as leave_paused_pools:
            yield leave_paused_pools


def _any_paused(tags: Tags) -> bool:
    return any(row.state != _core.STATE_ACTIVE and selects(tags, row.tag) for row in _core.segments())
