"""Collect the content of a report, as data for JSON. An unavailable part is None, and `missing` says why.

Its keys: `format`, `version`, `number` (of the report in its process), `time` and `time_ns`; the parts `failure`, `process`,
`device`, `ledger`, `tags`, `torch`, `settings`, `events` (an event file in itself) and `stacks`; `summary`, the paragraph in
plain English; and `missing`. Sizes are bytes.

The call stacks are those that hold most of the device's memory, where PyTorch records them. No recording is started, and the
names of C++ functions are never looked up: that takes seconds, and PyTorch starts the program addr2line for it. Without
asking for them, PyTorch cannot give the Python frames of a recording that has both.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._services import TorchCuda, is_recording, layer, may_have_native_frames
from torch_memory_saver._stacks import CallStack, Origin
from torch_memory_saver.observe._out_of_memory.account import Account, summarize
from torch_memory_saver.observe._out_of_memory.failure import Failure
from torch_memory_saver.observe.events.event_file import log_to_json
from torch_memory_saver.observe.events.log import EventLog, events, levels_before
from torch_memory_saver.observe.memory.snapshot_reader import KEY, parse

__all__ = ["FORMAT", "MAX_EVENTS", "MAX_STACKS", "VERSION", "collect", "largest_stacks"]

#: FORMAT is the value of the key "format". VERSION is the version of that format.
FORMAT, VERSION = "torch_memory_saver.out_of_memory", 1
#: Number of the latest events that are kept.
MAX_EVENTS = 200
#: Number of call stacks that are listed.
MAX_STACKS = 10
#: Variables that a report contains besides all variables of this package. Values of other variables might be secrets.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_OWN_PREFIX = "TMS_"
_NS_PER_SECOND = 1_000_000_000
_ACTIVE, _PAUSED = "active", "paused"
_FORMAT = 1


def collect(failure: Failure, account: Account, number: int) -> dict[str, Any]:
    """Return the report about a failure. Raises no Exception."""
    time_ns = time.time_ns()
    missing: dict[str, str] = {}

    def attempt(name: str, part: Callable[[], Any]) -> Any:
        try:
            return part()
        except Exception as error:  # whatever it is, the other parts are worth having
            missing[name] = f"{type(error).__name__}: {error}"
            return None

    report: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "number": number,
        "time": datetime.fromtimestamp(time_ns / _NS_PER_SECOND, timezone.utc).isoformat(timespec="milliseconds"),
        "time_ns": time_ns,
        "summary": attempt("summary", lambda: summarize(failure, account)),
        "failure": dataclasses.asdict(failure),
        "device": attempt("device", account.device_part),
        "ledger": attempt("ledger", account.ledger_part),
        "missing": missing,
    }
    report |= {name: attempt(name, partial(part, failure)) for name, part in _PARTS.items()}
    return report


def largest_stacks(torch: TorchCuda | None, device: int) -> dict[str, Any]:
    """Return the part of the report: `rows` (bytes, blocks, frames with the innermost call first, origin), largest first,
    and `note`, why there are none. Memory that is paused does not count."""
    why_not = _reason_not_to_read(torch)
    if torch is None or why_not:
        return {"rows": [], "note": why_not}
    managed = [
        {
            "address": row.address,
            "bytes": row.bytes,
            "device": row.device,
            "state": _PAUSED if row.state == _core.STATE_PAUSED else _ACTIVE,
            "tag": row.tag,
        }
        for row in _core.segments()
    ]
    snapshot = parse({"segments": torch.segments(), KEY: {"format": _FORMAT, "segments": managed}}, "")
    sums: dict[CallStack, tuple[int, int]] = {}
    for segment in snapshot.segments_of(device):
        for block in () if segment.paused else segment.blocks:
            if block.live:
                size, blocks = sums.get(block.stack, (0, 0))
                sums[block.stack] = (size + block.bytes, blocks + 1)
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:MAX_STACKS]
    return {"rows": list(_rows(largest)), "note": "" if largest else "PyTorch has no live block on this device"}


def _process(failure: Failure) -> dict[str, Any]:
    log = events()
    thread = threading.current_thread()
    return {
        "pid": log.pid,
        "rank": log.rank,
        "role": log.role,
        "host": log.host,
        "thread": thread.name,
        "native_thread": thread.native_id,
        "hook_mode": "preload" if _core.preloaded else "torch",
        "visible_captures": _core.counters()["visible_captures"],
        "python": sys.version.split()[0],
        "torch": getattr(layer.imported(), "__version__", None),
        "torch_memory_saver": sys.modules["torch_memory_saver"].__version__,
    }


def _tags(failure: Failure) -> list[dict[str, Any]]:
    """Return what each tag holds on each device, beginning with the device that ran out."""
    devices = sorted((row.device for row in _core.usage(None) if row.tag is None), key=lambda each: each != failure.device)
    return [
        {
            "tag": row.tag,
            "device": device,
            "allocations": row.allocations,
            "resident_bytes": row.resident_bytes,
            "slack_bytes": row.slack_bytes,
            "deferred_bytes": row.deferred_bytes,
            "paused_bytes": row.paused_bytes,
            "backup_bytes": row.backup_bytes,
            "damaged_bytes": row.damaged_bytes,
        }
        for device in devices
        for row in _core.usage(None, device)
        if row.tag is not None
    ]


def _torch(failure: Failure) -> dict[str, Any] | None:
    """Return PyTorch's own counters of the device, which include paused memory."""
    torch = layer.in_use()
    if torch is None or failure.device is None:
        return None
    stats = torch.memory_stats(failure.device)
    current = {
        name: stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved", "active", "inactive_split")
    }
    return {
        "allocated_bytes": current["allocated"],
        "reserved_bytes": current["reserved"],
        "releasable_bytes": current["reserved"] - current["active"] - current["inactive_split"],
        "fragmented_bytes": current["inactive_split"],
    }


def _settings(failure: Failure) -> dict[str, Any]:
    names = sorted(name for name in os.environ if name.startswith(_OWN_PREFIX) or name in _VARIABLES)
    return {
        "environment": {name: os.environ[name] for name in names},
        "memory_margin_bytes": _core.get_memory_margin(),
        "guard": bool(_core.get_guard()),
        "expandable_segments": layer.expandable_segments_on(os.environ),
    }


def _events(failure: Failure) -> dict[str, Any]:
    return log_to_json(_latest(events()))


def _latest(log: EventLog) -> EventLog:
    """Return the end of a log, with the levels before the first event that is kept."""
    kept = log.events[-MAX_EVENTS:]
    dropped = log.dropped + len(log.events) - len(kept)
    return dataclasses.replace(log, events=kept, before=levels_before(log.after, kept), dropped=dropped)


def _stacks(failure: Failure) -> dict[str, Any] | None:
    return None if failure.device is None else largest_stacks(layer.in_use(), failure.device)


_PARTS: dict[str, Callable[[Failure], Any]] = {
    "process": _process,
    "tags": _tags,
    "torch": _torch,
    "settings": _settings,
    "events": _events,
    "stacks": _stacks,
}


def _reason_not_to_read(torch: TorchCuda | None) -> str:
    if torch is None:
        return "PyTorch is not used in this process"
    if not is_recording(torch.torch):
        return "PyTorch records no call stacks: set TMS_DEBUG=history, or call memory.record_history()"
    if may_have_native_frames(torch.torch):
        return (
            "PyTorch records call stacks that may have C++ frames, whose names take seconds to find: let "
            'TMS_DEBUG=history or memory.record_history(stacks="python") start the recording'
        )
    return ""


def _rows(largest: Iterable[tuple[CallStack, tuple[int, int]]]) -> Iterable[dict[str, Any]]:
    for stack, (size, blocks) in largest:
        # Without PyTorch's trace a block that was allocated on a thread of C++ looks like one from before the recording.
        origin = stack.origin.value if stack.frames else f"{Origin.UNRECORDED.value}, or on a thread of C++"
        yield {"bytes": size, "blocks": blocks, "frames": [str(frame) for frame in stack.frames], "origin": origin}
