"""Guards that patches() is the list of what the package replaces in a process: of all callables that PyTorch, Python and
their classes have, those that a use of the package has replaced are exactly those in the list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import torch

from torch_memory_saver._patches import PATCHES

pytestmark = pytest.mark.outer

PROGRAMS = {
    "plain": Program("patches.py", ("plain",)),
    "torch": Program("patches.py", ("torch",)),
    "preload": Program("patches.py", ("preload",), (("TMS_INIT_ENABLE", "1"),), preload=True),
}


DISABLED = (("TMS_DISABLE", "1"), ("TMS_INIT_ENABLE", "1"))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run_programs(PROGRAMS.values())
    return {mode: json.loads(each.check().output) for mode, each in zip(PROGRAMS, done, strict=True)}


@pytest.mark.parametrize("mode", ["torch", "preload"])
def test_the_list_is_what_differs(mode: str, found: dict[str, Any]) -> None:
    of_pytorch = set(found["plain"]["changed"])
    assert "torch.cuda.empty_cache" not in of_pytorch
    changed = [name for name in found[mode]["changed"] if name not in of_pytorch]
    assert changed == found[mode]["listed"]
    assert found[mode]["settings"] == found["plain"]["settings"]


def test_nothing_differs_with_the_package_disabled(found: dict[str, Any]) -> None:
    programs = [Program("patches.py", (mode,), DISABLED, mode == "preload") for mode in ("torch", "preload")]
    for done in run_programs(programs):
        disabled = json.loads(done.check().output)
        assert set(disabled["changed"]) <= set(found["plain"]["changed"])
        assert disabled["listed"] == []
        assert disabled["settings"] == found["plain"]["settings"]


def test_each_row_of_the_table_happens(found: dict[str, Any]) -> None:
    happened = {name for mode in found.values() for name in mode["listed"]}
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    needed = [patch for patch in PATCHES if patch.until is None or release < tuple(map(int, patch.until.split(".")))]
    possible = {patch.name for patch in needed if not patch.name.startswith("vllm.")}
    possible.discard("torch.cuda._lazy_init")  # by `run`: test_run_command.py
    if not hasattr(torch._C._CUDAGraph, "capture_end_pre"):
        possible.discard("torch._C._CUDAGraph.capture_end_pre")
    if torch.cuda.device_count() < 2:
        possible.discard("torch.cuda.MemPool.__init__")
    assert happened == possible
