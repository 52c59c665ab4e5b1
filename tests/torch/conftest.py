"""The tests of this folder run PyTorch's CUDA build on the simulated GPU: in a process that ``python -m torch_memory_saver
simulate`` started (``make torch-test``), and nowhere else."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from not_imported import NotImported

sys.path.insert(0, str(Path(__file__).resolve().parent))

_HOW = "run 'make torch-test'"
_DEVICE_NAME = "Simulated GPU"


@functools.cache
def reason_to_skip() -> str | None:
    """The reason why PyTorch cannot be tested on the simulated GPU here; None if it can."""
    # Without this, importing the CUDA build fails where its CUDA packages are not installed.
    if "_simulated_cuda.so" not in os.environ.get("LD_PRELOAD", "") or "TMS_SIMULATED_DEVICES" not in os.environ:
        return f"needs PyTorch's CUDA build on the simulated GPU: {_HOW}"
    try:
        import torch
    except ImportError as error:
        return f"needs PyTorch's CUDA build: {error}"
    if torch.version.cuda is None:
        return f"needs PyTorch's CUDA build, and {torch.__version__} is built without CUDA"
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    reason = reason_to_skip()  # importing torch would fail
    return None if reason is None else NotImported.made(module_path, parent, reason)


@pytest.fixture(autouse=True, scope="session")
def on_the_simulated_gpu() -> None:
    """A real GPU must never run these tests."""
    import torch

    names = {torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())}
    assert names, "torch sees no simulated GPU"
    assert all(name.startswith(_DEVICE_NAME) for name in names), names


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """A tag that no other test of this process has."""
    return str(request.node.name)


@pytest.fixture
def store() -> Any:
    """The pools of this process."""
    from torch_memory_saver._engine.process import pool_store

    return pool_store


@pytest.fixture
def clean_device() -> Iterator[None]:
    """Each test begins with empty caches, and leaves no region in force, no routing and no managed memory."""
    import torch

    import torch_memory_saver
    from torch_memory_saver import _core
    from torch_memory_saver._engine.process import pool_store

    torch.zeros(1, device="cuda")
    torch_memory_saver.empty_cache()
    yield
    assert (_core.region_current().depth, pool_store.regions.stack(), pool_store.regions._admission.frames) == (0, [], {})
    gc.collect()
    torch_memory_saver.torch_memory_saver.resume()
    torch_memory_saver.empty_cache()
    assert _core.segments() == []
