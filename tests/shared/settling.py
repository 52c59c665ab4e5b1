"""Waiting for what the library does in the background, in the tests of every folder."""

from __future__ import annotations

import time
from typing import Any

#: Only for a library that never gets there.
GIVE_UP_S = 60


def wait_for_host_memory(core: Any) -> None:
    """Until host memory in which no backup lies has gone back to the system, but for the pool: a thread of the library's
    gives it back. For when there are no backups, and no views of them: memory around those is kept whole."""
    give_up = time.monotonic() + GIVE_UP_S
    while (counters := core.counters())["host_resident_bytes"] != counters["host_pooled_bytes"]:
        assert time.monotonic() < give_up, counters
        time.sleep(0)


def drain_pool(core: Any, tag: str = "drain") -> None:
    """Gives the memory of the pool back, by way of backups that lie in it and that do not leave it to the pool. `tag` must
    have no allocations."""
    size, page = core.counters()["host_pooled_bytes"], 4096
    addresses = []
    while (left := core.counters()["host_pooled_bytes"]) > 0 and size >= page:
        depth = core.region_push(tag, core.BACKUP_PINNED, True, core.HOST_RELEASE)
        try:
            addresses.append(core.allocate(size, 0))
        finally:
            core.region_pop(depth)
        core.pause((tag,), None)
        if core.counters()["host_pooled_bytes"] == left:
            size //= 2  # it has no gap of that size
    if addresses:
        core.resume((tag,), None, host_policy=core.HOST_RELEASE)
        for address in addresses:
            core.free(address)
