"""Guards the end of pools. Routing itself is in the tests of pools, over the fake torch."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver._torch.layer import leak_reference
from torch_memory_saver._torch.pool_stock import retire

POOL = (0, 7)


class MemPool:
    """A MemPool, of which only the end matters."""


@pytest.mark.parametrize("quietly", [True, False])
def test_the_end_of_a_pool_that_is_retired(quietly: bool) -> None:
    """Up to 2.9 the end of an object whose pool has another use ends the process: there the object stays."""
    calls: list[str] = []
    torch: Any = SimpleNamespace(
        begin_routing=lambda device, pool: calls.append("begin"),
        end_routing=lambda device, pool: calls.append("end"),
        release_pool=lambda device, pool: calls.append("release"),
        pool_objects_end_quietly=quietly,
    )
    retired = SimpleNamespace(id=POOL, device=0, memory_pool=MemPool(), retirement=None)
    leak_reference(retired.memory_pool)
    alive = weakref.ref(retired.memory_pool)
    retire(torch, retired)
    assert (alive() is None) == quietly
    assert calls == (["begin", "end", "release"] if quietly else ["release"])
