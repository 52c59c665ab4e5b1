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
