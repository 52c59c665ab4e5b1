"""Waits for the library's background work, for the tests of every folder."""

from __future__ import annotations

import time
from typing import Any

#: Reached only if the library never gets there.
GIVE_UP_S = 60


def wait_for_host_memory(core: Any) -> None:
    """Waits until host memory without backups has been released, except for the pool's: a thread of the library's releases
    it. Use it when there are no backups, and no views of them: memory around those is kept whole."""
    give_up = time.monotonic() + GIVE_UP_S
    while (counters := core.counters())["host_resident_bytes"] != counters["host_pooled_bytes"]:
        assert time.monotonic() < give_up, counters
        time.sleep(0)
