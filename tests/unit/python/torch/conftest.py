"""The tests of the torch layer run as with releases of PyTorch that differ."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[(2, 14), (2, 11), (2, 8)], ids=["torch-2.14", "torch-2.11", "torch-2.8"])
def release(request: pytest.FixtureRequest) -> tuple[int, int]:
    release: tuple[int, int] = request.param
    return release
