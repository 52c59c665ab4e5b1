"""Memory snapshots in PyTorch's format: those of tests/data, which PyTorch wrote, and others that a test writes by hand.

Nothing here decides where an allocator would put a block: a test that writes a snapshot names each segment, block and event.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20

#: A folder for each recording. A recording has four moments of the program in tools/record_snapshots.py.
RECORDINGS = Path(__file__).resolve().parents[3] / "data" / "memory_snapshots"
RECORDED = RECORDINGS / "simulated-gpu"
ALLOCATED, AWAITING_FREE, INACTIVE = "active_allocated", "active_awaiting_free", "inactive"

#: File, line and function; the innermost call first in a stack.
Call = tuple[str, int, str]
#: A row is a segment, a block, an event or a whole snapshot.
Row = dict[str, Any]


def frames_of(*calls: Call) -> list[Row]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in calls]


def block(size: int, *calls: Call, requested: int | None = None, state: str = ALLOCATED) -> Row:
    """Return a block, which gets its address from its segment. `calls`: the stack, the innermost call first."""
    return {
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": frames_of(*calls),
    }


def free(size: int) -> Row:
    return block(size, requested=0, state=INACTIVE)


def segment(address: int, *blocks: Row, device: int = 0, **others: Any) -> Row:
    """Return a segment that consists of `blocks`, in the order of their addresses."""
    placed, end = [], address
    for each in blocks:
        placed.append(each | {"address": end})
        end += each["size"]
    return {
        "device": device,
        "address": address,
        "total_size": end - address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": placed,
    } | others


def allocation(address: int, size: int, *calls: Call) -> Row:
    """Return the event of an allocation."""
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames_of(*calls)}


def deletion(address: int, size: int) -> list[Row]:
    """Return the two events of a deleted tensor."""
    row = {"addr": address, "size": size, "stream": 0, "frames": []}
    return [row | {"action": action} for action in ("free_requested", "free_completed")]


def snapshot(*segments: Row, events: Iterable[Row] = (), recording: bool = True, **own: Any) -> Row:
    """Return what `torch.cuda.memory._snapshot()` would. `own`: values of this package's key. Without, it is absent."""
    content: Row = {"segments": list(segments), "device_traces": [list(events)], "external_annotations": []}
    if own:
        content["torch_memory_saver"] = {
            "format": 1,
            "pid": 1,
            "role": "",
            "history": {"enabled": recording, "host": False},
            "segments": [],
            "devices": [],
        } | own
    return content


def write(path: Path, content: Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def recorded_files(folder: Path = RECORDED) -> list[Path]:
    """Return the files of a recording, in the order of time."""
    return sorted(folder.glob("*/*.pickle"))


def recorded() -> list[Row]:
    """Return the snapshots of a recording, which a test may change."""
    return [pickle.loads(path.read_bytes()) for path in recorded_files()]
