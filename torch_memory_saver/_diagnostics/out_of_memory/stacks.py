"""The call stacks that hold most of a device's memory, where PyTorch records them. Starts no recording.

The names of C++ functions are never looked up: that takes seconds, and PyTorch starts the program addr2line for it. Without
asking for them, PyTorch cannot give the Python frames of a recording that has both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._stacks import CallStack, Origin
from torch_memory_saver._torch.history import is_recording, may_have_native_frames
from torch_memory_saver._torch.layer import TorchCuda
from torch_memory_saver.memory.loading import KEY, parse

__all__ = ["MOST_STACKS", "largest_stacks"]

#: How many call stacks are listed.
MOST_STACKS = 10

_ACTIVE, _PAUSED = "active", "paused"
_FORMAT = 1


def largest_stacks(torch: TorchCuda | None, device: int) -> dict[str, Any]:
    """The part of the report: `rows` (bytes, blocks, frames with the innermost call first, origin), largest first, and
    `note`, why there are none. Memory that is paused does not count."""
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
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_STACKS]
    return {"rows": list(_rows(largest)), "note": "" if largest else "PyTorch has no live block on this device"}


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
