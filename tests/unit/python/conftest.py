"""Fixtures of the tests of the Python layer: programs in fresh processes, and a fake torch over the simulated GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

from fake_torch import FakeTorch
from processes import PRELUDE, Program, run_python
from recorded_hooks import Recorder

from torch_memory_saver import _core
from torch_memory_saver._engine import engine, preparation
from torch_memory_saver._engine.thread_pools import stop_following
from torch_memory_saver._text import forget_warnings
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.graphs.cuda_graph import GraphPools
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver


@pytest.fixture(autouse=True)
def warnings_are_logged_again() -> None:
    forget_warnings()


@pytest.fixture
def program() -> Program:
    """Runs Python text in a fresh process, preloaded unless `preloaded` is False, with more variables by keyword. It must
    end with `status`."""

    def run(text: str, *, preloaded: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_python("-c", (PRELUDE if preloaded else "") + text, preloaded=preloaded, **options)

    return run


@pytest.fixture
def command() -> Program:
    """Runs ``python -m torch_memory_saver`` with arguments, on a machine without a GPU."""

    def run(*arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        if arguments[:1] == ("simulate",):
            variables.setdefault("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # Simulated ones are meant there.
        return run_python("-m", "torch_memory_saver", *arguments, status=status, **variables)

    return run


@pytest.fixture
def release() -> tuple[int, int]:
    """The release of PyTorch that the stand-in is."""
    return 2, 11


@pytest.fixture
def fake_torch(release: tuple[int, int], simulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """torch as the package sees it. At the end of a test nothing may have crashed it, and nothing may be routed."""
    fake = FakeTorch(release)
    monkeypatch.setattr(layer, "_torch_cuda", fake)
    monkeypatch.setattr(_core, "device_count", lambda: fake.devices)
    # Which contexts are active depends on the tests that this process has run.
    monkeypatch.setattr(_core, "active_devices", lambda: fake.active_devices)
    yield fake
    assert fake.crashes == []
    assert fake.routings == []


@pytest.fixture
def hooks(simulator: Any, saver: TorchMemorySaver, fake_torch: FakeTorch) -> Iterator[Recorder]:
    """Hooks that record how they are called. Removed at the end."""
    recorder = Recorder(saver)
    yield recorder
    recorder.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolStore]:
    """An unused pool store, in place of the process's."""
    store = PoolStore()
    graph_pools = GraphPools(store)
    for module in (engine, preparation):
        monkeypatch.setattr(module, "pool_store", store)
        monkeypatch.setattr(module, "graph_pools", graph_pools)
    stop_following()  # the store of another test
    yield store
    stop_following()


@pytest.fixture
def saver(store: PoolStore) -> TorchMemorySaver:
    """A saver that has not been used."""
    return TorchMemorySaver()


@pytest.fixture
def context(simulator: Any) -> Iterator[None]:
    """This thread has a context, as in a program that uses CUDA."""
    driver, made = simulator.library, ctypes.c_void_p()
    driver.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0) == 0
    assert driver.cuCtxPushCurrent_v2(made) == 0
    yield
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(made)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
