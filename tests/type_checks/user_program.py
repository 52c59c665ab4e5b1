"""A program of a user, which `make lint` checks with mypy and pyright and which nothing runs.

The checkers know the types that this file asserts. A comment that ignores an error is an error itself if there is nothing to
ignore, so the wrong calls at the end must be refused.
"""

# The environment of the linters has no PyTorch, so the types of some parameters are unknown.
# pyright: strict, reportUnknownMemberType=false, reportMissingModuleSource=false, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import assert_type

import torch_memory_saver as package
from torch_memory_saver import Hook, HookCall, HookHandle, ManageHandle, PendingResume, PreserveHandle, ranks
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.reports import PauseReport, PreservedBlock, ResumeReport


def regions() -> int:
    """The body of a region returns, and the checkers know that the region does not swallow exceptions."""
    with saver.region("weights", backup="host", host_memory="retain", runs=False):
        return 1


def ordinary() -> int:
    with saver.disable():
        return 1


def child() -> int:
    with package.configure_subprocess():
        return 1


@saver.region("weights")
def load(path: str) -> int:
    return len(path)


@package.disable()
def load_outside(path: str) -> int:
    return len(path)


def decorators(graph: Any) -> None:
    @saver.cuda_graph(graph, tag="graphs")
    def capture(batch: int) -> str:
        return str(batch)

    assert_type(load("a"), int)
    assert_type(load_outside("a"), int)
    assert_type(capture(1), str)
    load(1)  # type: ignore[arg-type]


def calls(wait: bool, done: Callable[[int, int], None]) -> None:
    assert_type(saver.pause("weights", backup="discard", progress=done), PauseReport)
    assert_type(saver.resume("weights", progress=done), ResumeReport)
    assert_type(saver.resume("weights", wait=True), ResumeReport)
    assert_type(saver.resume("weights", wait=False), PendingResume)
    assert_type(package.resume(["weights", "kv"], wait=wait), ResumeReport | PendingResume)
    assert_type(ranks.pause("weights", timeout=3), PauseReport)
    assert_type(package.ranks.resume("weights", timeout=3), ResumeReport)


def hooks() -> None:
    @saver.on_pause("weights")
    def before(call: HookCall) -> None:
        print(call.bytes)

    assert_type(saver.on_pause("weights", "before", before), HookHandle)
    assert_type(saver.on_resume("weights", Hook()), HookHandle)


def managed(tensors: list[Any]) -> ManageHandle:
    handle = saver.manage(tensors, tag="weights")
    assert_type(handle.moved_bytes, int)
    return handle


def preserved(tensors: list[Any]) -> tuple[PreservedBlock, ...]:
    handle = saver.preserve(tensors)
    assert_type(handle, PreserveHandle)
    return handle.blocks


def refused() -> None:
    saver.region("weights", backup="hots")  # type: ignore[arg-type]
    saver.pause(3)  # type: ignore[arg-type]
    saver.enabled = False  # type: ignore[misc]
    ranks.pause(timeout=None)  # type: ignore[arg-type]
    print(package.rank)  # type: ignore[attr-defined]
