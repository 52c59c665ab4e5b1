"""Snapshots: PyTorch's view of its memory, with the managed segments beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank, write_file
from torch_memory_saver._services import current_history, is_recording, layer
from torch_memory_saver.reports.usage import take_stats

from .snapshot_reader import KEY

__all__ = ["FORMAT", "take_snapshot", "write_snapshot"]

#: Version of the format of the part that this package adds.
FORMAT = 1
#: The time of this import, which tells processes with equal ids apart: those of two runs in containers.
_STARTED_NS = time.time_ns()


def take_snapshot(*, tag: str = "", step: int | None = None, role: str | None = None) -> dict[str, Any]:
    """Return PyTorch's memory and the managed segments of this process at this moment.

    The function waits for no work and changes nothing on the device. It may be called inside regions, while memory is paused
    and during a capture. Other threads may allocate between the two parts.

    Args:
        tag: A name for the moment.
        step: The number of the moment.
        role: The role of this process. Default: the process's title, its name in multiprocessing, or its program.

    Returns:
        The dict that ``torch.cuda.memory._snapshot()`` returns, with one more key, ``"torch_memory_saver"``. Its value has
        the keys `format`, `pid`, `role`, `tag`, `started_ns`, `time_ns`, `history`, `segments` (address, bytes,
        reserved_bytes, device, state, backup and tag of each managed allocation) and `devices` (allocated, reserved, free
        and total bytes of each device in use). `rank`, `step`, and `max_entries` and `stacks` in `history`, are absent if
        they are not known, because the pickle of None has an opcode that PyTorch's snapshots lack. Snapshots that TMS_DEBUG
        requests also have `pausing`, the tags of the pause that follows (none: every tag).

    Raises:
        TorchUnavailableError: PyTorch cannot be imported, or finds no CUDA device.
        ForkedProcessError: This process was forked from one that used CUDA.
        DriverError: The driver does not report a device's memory.
    """
    torch = layer.require_module()
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    rank = own_rank()
    snapshot[KEY] = {
        "format": FORMAT,
        "pid": os.getpid(),
        **({} if rank is None else {"rank": rank}),
        "role": default_role() if role is None else role,
        "tag": tag,
        **({} if step is None else {"step": int(step)}),
        "started_ns": _STARTED_NS,
        "time_ns": time.time_ns(),
        "history": _history(torch),
        "segments": _managed_segments(),
        "devices": _devices(snapshot["segments"]),
    }
    return snapshot


def write_snapshot(
    path: str | os.PathLike[str],
    *,
    tag: str = "",
    step: int | None = None,
    role: str | None = None,
) -> Path:
    """Take a snapshot and write it to a file, which then holds all of it or does not exist.

    The file is a pickle that PyTorch's memory_viz page opens as well. It is written under a hidden name beside `path` and
    renamed. An existing file is replaced, a missing folder is made.

    Args:
        path: The path of the file, which usually ends in ``.pickle``.
        tag: See :func:`take_snapshot`.
        step: See :func:`take_snapshot`.
        role: See :func:`take_snapshot`.

    Returns:
        The path of the file.

    Raises:
        OSError: The file could not be written. Nothing is left behind.
        TorchUnavailableError: See :func:`take_snapshot`, also for the other errors.
    """
    target = Path(path)
    write_file(take_snapshot(tag=tag, step=step, role=role), target, aside=target.parent)
    return target


def _history(torch: Any) -> dict[str, Any]:
    history = current_history()
    known = {} if history is None else {"max_entries": history.max_entries, "stacks": history.stacks}
    return {"enabled": is_recording(torch), "host": history is not None and history.host, **known}


def _managed_segments() -> list[dict[str, Any]]:
    return [
        {
            "address": row.address,
            "bytes": row.bytes,
            "reserved_bytes": row.reserved_bytes,
            "device": row.device,
            "state": row.state,
            "backup": row.backup,
            "tag": row.tag,
        }
        for row in take_stats().allocations
    ]


def _devices(segments: list[dict[str, Any]]) -> list[dict[str, int]]:
    in_use = _core.active_devices()
    devices = {segment["device"] for segment in segments}
    devices.update(device for device in range(in_use.bit_length()) if in_use >> device & 1)
    rows = []
    for device in sorted(devices):
        memory = _core.device_memory(device)
        own = [segment for segment in segments if segment["device"] == device]
        rows.append(
            {
                "device": device,
                "allocated": sum(segment["allocated_size"] for segment in own),
                "reserved": sum(segment["total_size"] for segment in own),
                "free": memory.free,
                "total": memory.total,
            }
        )
    return rows
