"""Guards which blocks a pause takes for possible workspaces of cuBLAS, and when it looks for them; and captures whose random
state cannot be allocated."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver._torch.graphs.kept_objects import _StateForCapture, workspace_sizes
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver.options import RegionOptions

MIB = 1 << 20


def options(tag: str) -> RegionOptions:
    return RegionOptions.check(tag)


@pytest.mark.parametrize(
    ("blas", "lt", "expected"),
    [
        (None, None, {32 * MIB, 8 * MIB + 128 * 1024, MIB}),
        (":4096:8", None, {32 * MIB, MIB}),
        (":4096:2:16:8", "2048", {8 * MIB + 128 * 1024, 2 * MIB}),
        (":16:8", "not a number", {128 * 1024, MIB}),
        ("not a configuration", "", {32 * MIB, 8 * MIB + 128 * 1024, MIB}),
    ],
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, blas: str | None, lt: str | None, expected: set[int]) -> None:
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", blas), ("CUBLASLT_WORKSPACE_SIZE", lt)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert workspace_sizes() == expected


def test_a_pause_looks_once_after_each_region(store: PoolStore, fake_torch: FakeTorch) -> None:
    assert not store.regions.take_entered(None)
    frame = Frame(fake_torch, options("a"), store.regions.stack())  # type: ignore[arg-type]
    store.regions.enter(frame)
    assert not store.regions.take_entered(("b",))
    assert [store.regions.take_entered(("a",)) for _ in range(2)] == [True, True]  # it is open
    store.regions.leave(frame)
    assert [store.regions.take_entered(None) for _ in range(2)] == [True, False]


def test_a_capture_counts_as_a_region(store: PoolStore) -> None:
    store.regions.note_entered("graphs")
    assert [store.regions.take_entered(("graphs",)) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("is_capturing", [True, False])
def test_a_capture_goes_on_if_its_random_state_cannot_be_allocated(is_capturing: bool) -> None:
    steps: list[str] = []

    def fail(increment: int) -> None:
        steps.append(f"state {increment}")
        raise RuntimeError("out of memory")

    outside: Any = contextlib.ExitStack()
    outside.callback(steps.append, "region")
    torch: Any = SimpleNamespace(is_capturing=lambda: is_capturing)
    with _StateForCapture(outside, torch, SimpleNamespace(philox_state=fail)):
        steps.append("begin")
    assert steps == ["begin", *(["state 0"] * is_capturing), "region"], "the region is in force again, and nothing is raised"
