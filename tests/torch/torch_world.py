"""The model of model_torch.py: the tensors, the regions and their contents, in plain Python, and the comparison of all of it
with PyTorch and the native core."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torch_memory_saver
from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "model"))

from model_allocations import poison
from model_machine import Machine, first_difference, holds
from settling import wait_for_host_memory


@dataclass(eq=False)
class Managed:
    """A tensor. `tag` None: an ordinary one."""

    name: int
    tensor: torch.Tensor
    tag: str | None
    backup: str
    contents: bytes | None
    active: bool = True
    memory: str | None = None  # the region's host_memory
    place: str = ""  # of the last pause's contents
    copy: bytes | None = None  # the result of get_cpu_backup

    def __repr__(self) -> str:
        return (
            f"#{self.name} ({self.tag}, {self.backup}, {self.tensor.numel()} bytes, {'active' if self.active else 'paused'})"
        )


class TorchWorld:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tensors: list[Managed] = []
        self.levels: list[tuple[Any, str | None, str, str | None]] = []
        #: Tags with regions since their last pause: the copies of their resident tensors may be gone.
        self.entered: set[str] = set()
        self.steps: deque[str] = deque(maxlen=400)
        self.memory = "release"
        #: The options of the last pause and resume.
        self.pausing: dict[str, Any] = {}
        self.resuming: dict[str, Any] = {}
        self.rule: tuple[str, int, int, int] | None = None
        self._names = 0
        saver.host_memory = "release"

    def say(self, step: str) -> None:
        self.steps.append(step)

    def act(self, function: Callable[[], Any]) -> Any:
        """Runs the call with the failure of the rule, if there is one."""
        if self.rule is None:
            return function()
        self.machine.fail(*self.rule)
        try:
            return function()
        finally:
            self.machine.fail(self.rule[0], 0, 0, 0)

    def add(
        self, tensor: torch.Tensor, tag: str | None, backup: str, contents: bytes | None, memory: str | None = None
    ) -> Managed:
        self._names += 1
        managed = Managed(self._names, tensor, tag, backup, contents, memory=memory)
        self.tensors.append(managed)
        return managed

    def selected(self, tags: tuple[str, ...] | None, active: bool) -> list[Managed]:
        return [
            each
            for each in self.tensors
            if each.tag is not None and (tags is None or each.tag in tags) and each.active == active
        ]

    def paused(self, each: Managed) -> None:
        each.active = False
        self.entered.discard(str(each.tag))
        each.place = self.pausing.get("backup") or {"none": "discard"}.get(each.backup, each.backup)
        each.copy = None if each.place == "discard" else each.contents
        if each.place == "discard":
            each.contents = None

    def gave_up(self, each: Managed) -> None:
        """A pause that discards was told of a tensor that was paused already."""
        each.copy = each.contents = None

    def resumed(self, each: Managed) -> None:
        each.active = True
        if each.contents is None:
            size = each.tensor.numel()
            each.contents = bytes(size) if self.resuming.get("zero") else poison(size)
        policy = self.resuming.get("host_memory") or each.memory or self.memory
        if policy != "retain" or each.place == "disk":  # a file is read only while memory is paused
            each.copy = None

    def observe(self) -> None:
        """After a failure: each is paused or is not, with all consequences."""
        for each in self.tensors:
            row = _core.find(each.tensor.data_ptr())
            if each.tag is None or row is None:
                continue
            if each.active and row.state != _core.STATE_ACTIVE:
                self.paused(each)
            elif not each.active and row.state == _core.STATE_ACTIVE:
                self.resumed(each)
            elif each.active and each.copy is not None and saver.get_cpu_backup(each.tensor) is None:
                each.copy = None  # the failed pause had begun to overwrite it

    def check(self) -> None:
        torch.cuda.synchronize()
        self.entered.update(tag for _, tag, *_ in self.levels if tag is not None)
        for each in self.tensors:
            self.check_one(each)

    def check_one(self, each: Managed) -> None:
        address = each.tensor.data_ptr()
        row = _core.find(address)
        if each.tag is None:
            assert row is None, f"{each} is managed: {row}"
        else:
            assert row is not None, f"{each} is not managed"
            assert (row.state, row.tag) == (_core.STATE_ACTIVE if each.active else _core.STATE_PAUSED, each.tag), (
                f"{each}: {row}"
            )
            backup = saver.get_cpu_backup(each.tensor)
            if backup is None and each.active and each.tag in self.entered:
                each.copy = None
            assert (backup is None) == (each.copy is None), f"{each}: {'no' if backup is None else 'a'} backup"
            if backup is not None and each.copy is not None:
                assert backup.numpy().tobytes() == each.copy, f"the backup of {each} is wrong"
        if each.active and each.contents is not None:
            assert holds(address, each.contents), f"{each}: {first_difference(address, each.contents)}"

    def abandon(self) -> None:
        """Resets everything, whatever happened."""
        while self.levels:
            self.levels.pop()[0].__exit__(None, None, None)
        self.tensors.clear()
        gc.collect()
        saver.resume()
        saver.host_memory = "release"
        torch.cuda.synchronize()
        torch_memory_saver.empty_cache()
        torch.cuda.empty_cache()
        _core.resume((), None)

    def end(self) -> None:
        """Frees everything. Nothing managed is left."""
        self.abandon()
        wait_for_host_memory(_core)
        counters = _core.counters()
        left = {
            name: counters[name]
            for name in ("allocations", "resident_bytes", "paused_bytes", "host_backup_bytes", "damaged")
        }
        left |= {name: value for name, value in counters.items() if name.startswith("quarantined")}
        assert not any(left.values()), f"left at the end: {left}"
