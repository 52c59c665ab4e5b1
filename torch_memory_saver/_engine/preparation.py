"""Preparation of a pause or resume: checks, waits, and the arguments of the core's call.

The checks of `ranks` are made of the same functions, so that they find what the call would fail with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._engine.calls import hook_calls
from torch_memory_saver._engine.calls.hook_calls import has_inherited_memory, refuse_inner_call
from torch_memory_saver._engine.calls.pending import on_main_thread
from torch_memory_saver._engine.native_log import passes_log_on
from torch_memory_saver._engine.process import (
    blas_workspaces,
    graph_pools,
    pending_resumes,
    pool_store,
    preserved,
    resumed_blocks,
)
from torch_memory_saver._engine.tensors.preserved import preserving_finder
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.memory.live_blocks import live_finder
from torch_memory_saver._torch.memory.pause_preparation import PausePreparation, await_regions
from torch_memory_saver._torch.pools.retirement import must_not_free
from torch_memory_saver.options import PauseOptions, ResumeOptions

__all__ = [
    "check_before_pause",
    "check_before_resume",
    "check_pause",
    "check_resume",
    "core_arguments",
    "current_stream",
    "prepare_pools",
    "prepare_resume",
    "settle_pause",
]


@passes_log_on
def check_pause(options: PauseOptions) -> None:
    """Raise what a pause is known to fail with, after waiting for what it waits for. Nothing is paused.

    Room for the backups is checked as well, unless a callback runs before the pause, because it may make room.

    Raises:
        TorchMemorySaverError: The reasons are those of :meth:`TorchMemorySaver.pause`.
    """
    settle_pause(options)
    check_before_pause(options)
    if hook_calls.has_before_callback("pause", options.tags):
        return
    torch = layer.in_use()
    with prepare_pools(torch, options, only_waits=True):
        _core.check_pause(options.tags, current_stream(torch), **core_arguments(torch, options))


def check_resume(options: ResumeOptions) -> None:
    """Raise what a resume is known to fail with. Nothing is resumed.

    Raises:
        InvalidStateError, CaptureInProgressError: The reasons are those of :meth:`TorchMemorySaver.resume`.
    """
    refuse_inner_call("resume")
    check_before_resume(options)


def settle_pause(options: PauseOptions) -> None:
    """Begin a pause: refuse it inside another call, and wait for resumes in the background."""
    refuse_inner_call("pause")
    pending_resumes.settle("pause", options.tags, options.deadline)


def check_before_pause(options: PauseOptions) -> None:
    """Raise what a pause is known to fail with, after it has waited for regions of other threads."""
    _refuse_early(_core.pause)
    await_regions(pool_store, options.tags, options.deadline)


def prepare_pools(torch: TorchCuda | None, options: PauseOptions, only_waits: bool = False) -> PausePreparation:
    """Return the context manager that prepares PyTorch's pools for a pause, or for its check."""

    def free_caches(found: TorchCuda) -> None:
        blas_workspaces.free_in(found, pool_store, options.tags, graph_pools.default_pool_managed)

    return PausePreparation(pool_store, torch, options.tags, options.deadline, free_caches, only_waits)


def core_arguments(torch: TorchCuda | None, options: PauseOptions) -> dict[str, Any]:
    """Return the arguments of the core's pause, or of its check of one: the options, and which contents it keeps."""
    every_backup = "backup" in options.core
    find_live = live_finder(torch, pool_store, options.tags, every_backup) if options.asks_for_live else None
    preserves = not every_backup and not preserved.is_empty
    if preserves:
        find_live = preserving_finder(find_live, preserved, options.tags)
    return {**options.core, "interruptible": on_main_thread(), "find_live": find_live, "preserves": preserves}


def check_before_resume(_: ResumeOptions) -> None:
    """Raise what a resume is known to fail with, whatever it selects."""
    _refuse_early(_core.resume)


def _refuse_early(operation: Callable[[tuple[str, ...], int | None], object]) -> None:
    """Raise what a pause or resume of the core would raise at once because of a capture, a lost device, or a fork.

    The core decides, since a capture that is on its list may have ended: it is called with no tag. Only where there is a
    reason to ask, because such a call counts as a pause or resume.
    """
    torch = layer.in_use()
    if has_inherited_memory() or _core.counters()["visible_captures"] or (torch is not None and must_not_free(torch)):
        operation((), current_stream(torch))


def prepare_resume(options: ResumeOptions) -> TorchCuda | None:
    """Record the blocks that are live now for check_fresh(), in guard mode. Return PyTorch's layer, if it is in use."""
    torch = layer.in_use()
    if _core.get_guard():
        resumed_blocks.note(torch, options.tags)
    return torch


def current_stream(torch: TorchCuda | None) -> int | None:
    return None if torch is None else torch.current_stream()
