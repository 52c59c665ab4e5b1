"""Guards what is said of a pause that copies only what has changed: the report, the counters, the metrics, the log line, the
event, the trace and the timeline."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events.chrome_trace import trace_events
from torch_memory_saver.observe.events.metrics import metrics
from torch_memory_saver.observe.events.timeline.html.document import page
from torch_memory_saver.observe.events.timeline.merge import hosts_of
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
CHUNK = 512 << 10


def test_everything_tells_what_was_not_copied(
    saver: TorchMemorySaver, simulator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with core_region("changes", _core.BACKUP_PINNED, True, _core.HOST_RETAIN):
        address = _core.allocate(4 * MIB, 0)
    simulator.write(address, b"1" * (4 * MIB))
    assert saver.pause("changes").unchanged_bytes == 0
    saver.resume("changes")
    simulator.write(address + MIB, b"2")
    before = _core.counters()
    with caplog.at_level(logging.INFO, "torch_memory_saver"):
        report = saver.pause("changes")
    assert (report.copied_bytes, report.unchanged_bytes) == (CHUNK, 4 * MIB - CHUNK)
    after = _core.counters()
    assert after["pause_unchanged_bytes_total"] - before["pause_unchanged_bytes_total"] == 4 * MIB - CHUNK
    assert after["pause_copied_bytes_total"] - before["pause_copied_bytes_total"] == CHUNK
    assert f'kept_bytes_total{{how="unchanged"}} {after["pause_unchanged_bytes_total"]}\n' in metrics()
    log = events.events()
    end = [event for event in log.events if (event.operation, event.kind) == ("pause", "end")][-1]
    assert (end.copied_bytes, end.unchanged_bytes) == (CHUNK, 4 * MIB - CHUNK)
    *_, row = (each for each in trace_events(log, 0) if each.get("args", {}).get("unchanged_bytes"))
    assert row["args"]["unchanged_bytes"] == 4 * MIB - CHUNK
    assert f'"unchanged":{4 * MIB - CHUNK}' in page(hosts_of([log])).replace('": ', '":')
    assert saver.resume("changes").copied_bytes == 4 * MIB
    assert simulator.read(address, 4 * MIB) == b"1" * MIB + b"2" + b"1" * (3 * MIB - 1)
    _core.free(address)
