"""Pages as plain values, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_memory_saver.observe._processes.shared_pages import Page, PageDevice, Row

MIB = 1 << 20


def make_row(tag: str, device: int = 0, **numbers: int) -> Row:
    fields = dict.fromkeys((name for name in Row.__dataclass_fields__ if name not in ("tag", "device")), 0)
    return Row(tag, device, **{**fields, **numbers})


def make_page(pid: int, *rows: Row, uuids: tuple[str, ...] = ("GPU-0",), **fields: Any) -> Page:
    counters = {
        f"{which}_{what}_total": 0
        for which, what in (("failed", "pauses"), ("failed", "resumes"), ("failed", "allocations"))
    } | {"last_pause_ended": 0, "last_resume_ended": 0}
    counters.update(fields.pop("counters", {}))
    values: dict[str, Any] = {
        "path": Path(f"/pages/tms-{pid}-0.page"),
        "pid": pid,
        "foreign": False,
        "name": "job",
        "rank": None,
        "serves": True,
        "process_started": 1,
        "devices": tuple(PageDevice(uuid, 100 * MIB) for uuid in uuids),
        "rows": rows,
        "running": "",
        "running_since": 0,
        "counters": counters,
        "requests": 0,
        "served_total": (0, 0),
        "unserved_total": (0, 0),
        "serve_error": (0, 0),
    }
    return Page(**{**values, **fields})
