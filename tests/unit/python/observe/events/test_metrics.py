"""Guards the OpenMetrics text: its format, by Prometheus's own parser, and its numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core
from torch_memory_saver.observe import events
from torch_memory_saver.observe.events.metrics import format_metrics

MIB = 1 << 20


def row(tag: str, resident: int, paused: int = 0, damaged: int = 0, backup: int = 0, slack: int = 0) -> Any:
    return _core.Usage((tag, -1, 1, 1, resident, paused, damaged, backup, resident, slack, 0))  # type: ignore[call-arg]


ROWS = ((0, row("kv", 7, 24, 32, 3, 5)), (1, row('a "b"\\\n', 64)))
COUNTERS = {
    "pauses_total": 3,
    "resumes_total": 2,
    "allocations_total": 9,
    "frees_total": 1,
    "failed_pauses_total": 5,
    "failed_resumes_total": 0,
    "failed_allocations_total": 6,
    "pause_nanoseconds_total": 1_500_000_000,
    "resume_nanoseconds_total": 250_000,
    "pause_copied_bytes_total": 11,
    "pause_unchanged_bytes_total": 13,
    "shared_backup_bytes": 19,
    "shared_made_bytes": 17,
}
TEXT = """\
# TYPE torch_memory_saver_memory_bytes gauge
# UNIT torch_memory_saver_memory_bytes bytes
# HELP torch_memory_saver_memory_bytes Memory by tag, device and state: resident, slack and deferred (both of freed \
allocations), paused, damaged (not usable) or backup.
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="resident"} 64
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="slack"} 0
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="deferred"} 0
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="paused"} 0
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="damaged"} 0
torch_memory_saver_memory_bytes{tag="a \\"b\\"\\\\\\n",device="1",state="backup"} 0
torch_memory_saver_memory_bytes{tag="kv",device="0",state="resident"} 7
torch_memory_saver_memory_bytes{tag="kv",device="0",state="slack"} 5
torch_memory_saver_memory_bytes{tag="kv",device="0",state="deferred"} 0
torch_memory_saver_memory_bytes{tag="kv",device="0",state="paused"} 24
torch_memory_saver_memory_bytes{tag="kv",device="0",state="damaged"} 32
torch_memory_saver_memory_bytes{tag="kv",device="0",state="backup"} 3
# TYPE torch_memory_saver_shared_bytes gauge
# UNIT torch_memory_saver_shared_bytes bytes
# HELP torch_memory_saver_shared_bytes Objects of the shared store that this process holds, each counted once: written by \
it (made), or found (linked).
torch_memory_saver_shared_bytes{how="made"} 17
torch_memory_saver_shared_bytes{how="linked"} 2
# TYPE torch_memory_saver_calls counter
# HELP torch_memory_saver_calls Calls that succeeded.
torch_memory_saver_calls_total{operation="pause"} 3
torch_memory_saver_calls_total{operation="resume"} 2
torch_memory_saver_calls_total{operation="allocate"} 9
torch_memory_saver_calls_total{operation="free"} 1
# TYPE torch_memory_saver_failures counter
# HELP torch_memory_saver_failures Pauses, resumes and allocations that failed.
torch_memory_saver_failures_total{operation="pause"} 5
torch_memory_saver_failures_total{operation="resume"} 0
torch_memory_saver_failures_total{operation="allocate"} 6
# TYPE torch_memory_saver_call_seconds counter
# UNIT torch_memory_saver_call_seconds seconds
# HELP torch_memory_saver_call_seconds Time of the pauses and resumes that succeeded.
torch_memory_saver_call_seconds_total{operation="pause"} 1.5
torch_memory_saver_call_seconds_total{operation="resume"} 0.00025
# TYPE torch_memory_saver_kept_bytes counter
# UNIT torch_memory_saver_kept_bytes bytes
# HELP torch_memory_saver_kept_bytes Contents that pauses kept: copied, or unchanged since an earlier pause and not copied.
torch_memory_saver_kept_bytes_total{how="copied"} 11
torch_memory_saver_kept_bytes_total{how="unchanged"} 13
# EOF
"""


def test_the_text() -> None:
    assert format_metrics(ROWS, COUNTERS) == TEXT


def test_prometheus_reads_it() -> None:
    parser = pytest.importorskip(
        "prometheus_client.openmetrics.parser", reason="needs prometheus_client (the extra test), which parses the text"
    )
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(format_metrics(ROWS, COUNTERS))
        for sample in family.samples
    }
    assert samples["torch_memory_saver_memory_bytes", "kv", "0", "paused"] == 24
    assert samples["torch_memory_saver_memory_bytes", 'a "b"\\\n', "1", "resident"] == 64
    assert samples["torch_memory_saver_call_seconds_total", "pause"] == 1.5
    assert samples["torch_memory_saver_calls_total", "resume"] == 2
    assert samples["torch_memory_saver_failures_total", "allocate"] == 6
    assert samples["torch_memory_saver_kept_bytes_total", "unchanged"] == 13
    assert samples["torch_memory_saver_shared_bytes", "linked"] == 2
    assert len(samples) == 25
    assert len(list(parser.text_string_to_metric_families(format_metrics((), COUNTERS)))) == 5


def test_the_numbers_are_those_of_the_process(simulator: Any, tmp_path: Path) -> None:
    with core_region("metrics", _core.BACKUP_PINNED, True):
        address = _core.allocate(3 * MIB, 1)
    _core.pause(("metrics",), None)
    lines = events.write_metrics(tmp_path / "new" / "metrics.prom").read_text().splitlines()
    counters = _core.counters()
    assert f'torch_memory_saver_memory_bytes{{tag="metrics",device="1",state="paused"}} {4 * MIB}' in lines
    assert 'torch_memory_saver_memory_bytes{tag="metrics",device="1",state="resident"} 0' in lines
    assert f'torch_memory_saver_memory_bytes{{tag="metrics",device="1",state="backup"}} {3 * MIB}' in lines
    assert f'torch_memory_saver_calls_total{{operation="pause"}} {counters["pauses_total"]}' in lines
    assert f'torch_memory_saver_failures_total{{operation="pause"}} {counters["failed_pauses_total"]}' in lines
    _core.free(address)
    assert os.listdir(tmp_path / "new") == ["metrics.prom"]
