"""Fixtures of the tests of the Python layer: programs in fresh processes, and a fake torch over the simulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_torch import FakeTorch

import torch_memory_saver
from torch_memory_saver import _core, implementation, preload, torch_layer
from torch_memory_saver.graphs import GraphPools
from torch_memory_saver.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

PACKAGE = Path(torch_memory_saver.__file__).parent
SIMULATOR = PACKAGE / "_simulated_cuda.so"
TIMEOUT_S = 120

#: Put before every program: the CUDA runtime's functions as the preload library and the simulated GPU give them.
PRELUDE = """
import ctypes, logging, os, sys
import torch_memory_saver as module
from torch_memory_saver import torch_memory_saver, _core
MIB = 1 << 20
runtime = ctypes.CDLL(None)
def cuda_malloc(size):
    address = ctypes.c_void_p()
    result = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
    assert result == 0, result
    return address.value
def cuda_free(address):
    assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
def fill(address, size, value):
    assert runtime.cudaMemset(ctypes.c_void_p(address), value, ctypes.c_size_t(size)) == 0
def read(address, size):
    host = ctypes.create_string_buffer(size)
    assert runtime.cudaMemcpy(host, ctypes.c_void_p(address), ctypes.c_size_t(size), 2) == 0
    return host.raw
def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value
"""

Program = Callable[..., subprocess.CompletedProcess[str]]


def wait_until(condition: Callable[[], bool]) -> None:
    """For what the library does in the background, such as giving host memory back."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def environment(preloaded: bool, **variables: str) -> dict[str, str]:
    """A process's environment: the package under test, the simulated GPU, and the libraries preloaded or not."""
    result = {name: value for name, value in os.environ.items() if not name.startswith(("TMS_", "LD_PRELOAD"))}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), result.get("PYTHONPATH")]))
    result["TMS_CUDA_DRIVER"] = str(SIMULATOR)
    result["TMS_SIMULATED_MEMORY"] = "512MiB"
    result["CUDA_VISIBLE_DEVICES"] = ""  # torch must not find a real GPU; the simulated one looks at it under simulate only.
    if preloaded:
        result["LD_PRELOAD"] = f"{preload.library_path()}:{SIMULATOR}"
    return result | variables


@pytest.fixture
def program() -> Program:
    """Runs Python text in a fresh process, preloaded unless `preloaded` is False, with more variables by keyword. It must
    end with `status`."""

    def run(text: str, *, preloaded: bool = True, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", (PRELUDE if preloaded else "") + text],
            env=environment(preloaded, **variables),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def command() -> Program:
    """Runs ``python -m torch_memory_saver`` with arguments, on a machine without a GPU."""

    def run(*arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        if arguments[:1] == ("simulate",):
            variables.setdefault("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # Simulated ones are meant there.
        done = subprocess.run(
            [sys.executable, "-m", "torch_memory_saver", *arguments],
            env=environment(False, **variables),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(params=[True, False], ids=["torch-2.11", "torch-2.8"])
def fake_torch(request: pytest.FixtureRequest, simulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """torch as the package sees it. Nothing may have crashed it, and nothing may be routed, when the test ends."""
    fake = FakeTorch(last_routed_wins=request.param)
    monkeypatch.setattr(torch_layer, "_torch_cuda", fake)
    monkeypatch.setattr(_core, "device_count", lambda: fake.devices)
    # Which contexts are active depends on the tests that this process has run.
    monkeypatch.setattr(_core, "active_devices", lambda: fake.active_devices)
    yield fake
    assert fake.crashes == []
    assert fake.routings == []


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> PoolStore:
    """A pool store that no other test has used, in place of the process's."""
    store = PoolStore()
    monkeypatch.setattr(implementation, "pool_store", store)
    monkeypatch.setattr(implementation, "graph_pools", GraphPools(store))
    return store


@pytest.fixture
def saver(store: PoolStore) -> TorchMemorySaver:
    """A saver that has not been used."""
    return TorchMemorySaver()
