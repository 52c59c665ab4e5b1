"""Guards what print() shows of reports and handles, which is for people, and that repr() stays for programs."""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import Mock

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import Hook, TorchMemorySaver, nccl
from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle
from torch_memory_saver._engine.tensors.preserved import PreserveHandle
from torch_memory_saver.reports import PauseReport, PreservedBlock, ResumeReport, Usage

MIB = 1 << 20
TAGS = {"weights": 60 * MIB, "kv_cache": 10 * MIB}


def of(text: object) -> str:
    """Return what is printed, without the time."""
    return re.sub(r"in \d+\.\d+ m?s", "in ? ms", str(text))


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (PauseReport(), "paused nothing, because none of this memory was resident"),
        (ResumeReport(), "resumed nothing, because none of this memory was paused"),
        (
            PauseReport(2, 70 * MIB, 0, 0, 0.0078, bytes_by_tag=TAGS),
            "paused 70 MiB of kv_cache and weights in 7.8 ms, nothing copied",
        ),
        (
            ResumeReport(9, 80 * MIB, MIB, 0, 1.5, bytes_by_tag=TAGS),
            "resumed 80 MiB of kv_cache, weights and others in 1.50 s, 1 MiB copied",
        ),
        (
            PauseReport(1, 8, 0, 0, 0.0, 1, 2, 3, 4, bytes_by_tag={"a\nb": 8}),
            "paused 8 B of a?b in 0.0 ms, nothing copied, 1 B unchanged, 2 B that new tensors could use before the resume, "
            "3 B possibly still mapped by other processes, 4 B of replaced parameters not paused",
        ),
        (PauseReport(1, 8, 8), "paused 8 B in 0.0 ms, 8 B copied"),
    ],
)
def test_reports(report: object, text: str) -> None:
    assert str(report) == text
    assert "by_tag" not in repr(report) and repr(report).startswith(f"{type(report).__name__}(allocations=")


def test_tags_are_those_that_changed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    nothing = "paused nothing, because none of this memory was resident"
    assert str(saver.pause(backup="discard")) == nothing
    for tag in "abcdef":
        with saver.region(tag, backup="host" if tag == "a" else None):
            fake_torch.allocate(2 * MIB)
    report = saver.pause(["a", "b"])
    assert report.bytes_by_tag == {"a": 2 * MIB, "b": 2 * MIB}
    assert of(report) == "paused 4 MiB of a and b in ? ms, 2 MiB copied"
    assert report == dataclasses.replace(report, bytes_by_tag={})
    assert of(saver.pause(["b", "c"])) == "paused 2 MiB of c in ? ms, nothing copied"
    assert str(saver.pause("a")) == nothing
    saver.pause()
    assert of(saver.resume("a")) == "resumed 2 MiB of a in ? ms, 2 MiB copied"
    saver.pause("a")
    gone = "memory that was paused already has no backup any more"
    assert str(saver.pause("a", backup="discard")) == f"paused nothing; {gone}"
    saver.resume("a")
    report = saver.resume(wait=False).wait()
    assert (len(report.bytes_by_tag), report.bytes) == (4, 10 * MIB)
    assert of(report) == "resumed 10 MiB of b, c, d, e and others in ? ms, nothing copied"


def test_handles(saver: TorchMemorySaver) -> None:
    handle = saver.on_pause(["weights", "kv_*"], "after", test_handles)
    assert str(handle) == repr(handle) == "<HookHandle: test_handles after each pause of weights and kv_*>"
    handle.remove()
    handle.remove()
    assert str(handle) == "<HookHandle: removed: test_handles after each pause of weights and kv_*>"
    hook = Hook()
    hook.after = print  # type: ignore[method-assign]
    both = saver.on_resume(None, hook)
    assert str(both) == "<HookHandle: Hook around each resume of every tag>"
    both.remove()
    suspended = nccl.suspend_on_pause("weights")
    every = "<HookHandle: NcclHook._after_pause after each pause of weights>"
    assert str(suspended) == f"<NcclHook: nothing suspended now, {every}>"
    suspended.remove()
    blocks = (PreservedBlock(0, MIB, 0, "a"), PreservedBlock(MIB * 2, MIB, 0, "a"))
    preserving = PreserveHandle(blocks, lambda: None)
    assert str(preserving) == "<PreserveHandle: 2 blocks, 2 MiB, which pauses keep>"
    preserving.remove()
    assert str(preserving) == "<PreserveHandle: removed: 2 blocks, 2 MiB>"
    moved = ManageHandle()
    moved.moved_bytes = 3 * MIB
    assert str(moved) == "<ManageHandle: moved 3 MiB to managed memory>"
    moved._followers = [Mock(is_active=True)]
    assert str(moved) == "<ManageHandle: moved 3 MiB to managed memory, follows 1 optimizer>"
    moved._followers[0].remove.side_effect = lambda: moved._followers[0].configure_mock(is_active=False)
    moved.remove()
    assert str(moved) == "<ManageHandle: removed: moved 3 MiB to managed memory>"


def test_usage() -> None:
    assert str(Usage(1, 2 * MIB, 4 * MIB)) == "1 allocation, 4 MiB resident, 0 B paused, 0 B backup"
    usage = Usage(2, 8, 8, 8, 8, damaged_bytes=8, slack_bytes=16)
    assert str(usage) == "2 allocations, 8 B resident, 8 B paused, 8 B backup, 16 B slack, 8 B damaged"


def test_regions_and_the_saver(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert repr(TorchMemorySaver()) == "<TorchMemorySaver: hook mode auto, not used yet>"
    region = saver.region("weights", backup="disk")
    assert repr(saver) == "<TorchMemorySaver: hook mode torch, in use>"
    assert repr(region) == "<region(tag='weights'), not entered>"
    with region:
        assert repr(region) == "<region(tag='weights'), entered>"
        assert repr(saver.disable()) == "<disable(), not entered>"
    assert repr(saver.region("kv_cache")) == "<region(tag='kv_cache'), not entered>"
