"""Fixtures of the tests of the torch layer, which run as with releases of PyTorch that differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core

MIB = 1 << 20


@pytest.fixture(params=[(2, 14), (2, 11), (2, 8)], ids=["torch-2.14", "torch-2.11", "torch-2.8"])
def release(request: pytest.FixtureRequest) -> tuple[int, int]:
    release: tuple[int, int] = request.param
    return release


@pytest.fixture
def no_warning() -> Iterator[None]:
    """Warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture
def load(fake_torch: FakeTorch) -> Callable[..., str | None]:
    """A function that makes a tensor and returns its tag."""

    def load(size: int = 2 * MIB) -> str | None:
        row = _core.find(fake_torch.allocate(size))
        return None if row is None else row.tag

    return load
