"""Guards the rule by which a pool is retired: what it returns is weighed against what it strands."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver._torch.pool_stock import Fill, is_worth_retiring, measure_fill
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


@pytest.mark.parametrize(
    ("idle", "free", "live", "stranded", "expected"),
    [
        (0, 0, False, 0, False),
        (2, 0, False, 100, True),  # nothing in it is live
        (2, 0, True, 0, True),
        (18, 18, True, 0, False),
        (20, 18, True, 0, True),
        (20, 18, True, 2, False),  # what is stranded already counts
        (22, 10, True, 11, True),
        (30, 27, True, 0, False),  # a loss of more than 22 MiB
        (54, 27, True, 0, False),
        (55, 27, True, 0, True),
        (0, 27, True, 0, False),
    ],
)
def test_the_rule(idle: int, free: int, live: bool, stranded: int, expected: bool) -> None:
    assert is_worth_retiring(Fill(idle * MIB, free * MIB, live), stranded * MIB) is expected


def test_the_fill_of_segments() -> None:
    def segment(*blocks: tuple[int, str]) -> dict[str, Any]:
        listed = [{"size": size, "state": state} for size, state in blocks]
        return {"total_size": sum(size for size, _ in blocks), "blocks": listed}

    segments = [
        segment((4, "inactive")),
        segment((1, "inactive"), (2, "active_allocated"), (3, "inactive")),
        segment((5, "inactive"), (6, "active_pending_free")),
        segment((7, "active_allocated")),
    ]
    assert measure_fill(segments) == Fill(idle=4, free=9, live=True)
    assert measure_fill(segments[:1]) == Fill(idle=4, free=0, live=False)
    assert measure_fill([]) == Fill(idle=0, free=0, live=False)


def test_what_is_stranded_is_of_the_tag_and_the_device(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    for tag in ("a", "b"):
        with saver.region(tag):
            kept, idle = fake_torch.allocate(20 * MIB), fake_torch.allocate(64 * MIB)
            fake_torch.split(kept, (4 * MIB, "active_allocated"), (16 * MIB, "inactive"))
            fake_torch.free(idle)
    assert store.stranded_bytes(fake_torch, "a", 0) == 16 * MIB  # type: ignore[arg-type]
    assert store.stranded_bytes(fake_torch, "a", 1) == 0  # type: ignore[arg-type]
    assert store.stranded_bytes(fake_torch) == 32 * MIB  # type: ignore[arg-type]
    assert saver.stats().stranded_bytes == 32 * MIB


def test_pools_without_memory_are_not_remembered(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    for _ in range(100):
        with saver.region("a"):
            fake_torch.free(fake_torch.allocate(2 * MIB))
    assert store.retired_pools() == frozenset()
    assert len(fake_torch.alive) <= 2, "one for the next region, and one that is routed while others are emptied"
