"""The tests of the torch layer run as with two releases of PyTorch, where they differ."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["torch-2.11", "torch-2.8"])
def last_routed_wins(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
