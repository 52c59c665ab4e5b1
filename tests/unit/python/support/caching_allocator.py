"""A simulator of PyTorch's caching allocator: sizes of segments, splitting, merging and history as in CUDACachingAllocator.

It hands out numbers for addresses, and writes the snapshots that PyTorch would.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
_ROUNDING = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE, _LARGE_SEGMENT = 10 * MIB, 20 * MIB
_FIRST_ADDRESS = 1 << 40

#: File, line and function; the innermost call first.
Call = tuple[str, int, str]


def frames_of(*calls: Call) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in calls]


@dataclass
class _Block:
    address: int
    size: int
    requested: int = 0
    frames: list[dict[str, Any]] | None = None
    state: str = "inactive"


@dataclass
class _Segment:
    address: int
    size: int
    kind: str
    blocks: list[_Block] = field(default_factory=list)


class CachingAllocator:
    """The allocator of one device.

    Args:
        device: The CUDA ordinal.
        max_entries: Events that the history keeps; the oldest are dropped.
    """

    def __init__(self, device: int = 0, max_entries: int = 100_000) -> None:
        self.device = device
        self.recording = True
        self._max_entries = max_entries
        self._segments: list[_Segment] = []
        self._next_address = _FIRST_ADDRESS
        self._trace: list[dict[str, Any]] = []
        self._stacks: dict[tuple[Call, ...], list[dict[str, Any]]] = {}

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self._blocks() if block.state == "active_allocated")

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self._segments)

    def alloc(self, size: int, *calls: Call) -> int:
        """The address of a new block; `calls`: its stack, the innermost first."""
        rounded = max(-(-size // _ROUNDING) * _ROUNDING, _ROUNDING)
        segment, block = self._find(rounded) or self._reserve(rounded, calls)
        rest = block.size - rounded
        if rest >= _ROUNDING if segment.kind == "small" else rest > _SMALL:
            segment.blocks.insert(segment.blocks.index(block) + 1, _Block(block.address + rounded, rest))
            block.size = rounded
        block.state, block.requested = "active_allocated", size
        block.frames = self._frames(calls) if self.recording else None
        self._record("alloc", block.address, size, calls)
        return block.address

    def free(self, address: int, awaiting: bool = False) -> None:
        """Frees a block. `awaiting`: another stream still uses it."""
        for segment in self._segments:
            for at, block in enumerate(segment.blocks):
                if block.address == address:
                    self._record("free_requested", address, block.requested, ())
                    if awaiting:
                        block.state = "active_awaiting_free"
                        return
                    self._record("free_completed", address, block.requested, ())
                    block.state = "inactive"
                    self._merge(segment, at)
                    return
        raise KeyError(address)

    def empty_cache(self) -> None:
        for segment in [one for one in self._segments if all(block.state == "inactive" for block in one.blocks)]:
            self._segments.remove(segment)
            self._record("segment_free", segment.address, segment.size, ())

    def snapshot(self, **own: Any) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` returns. `own`: of this package's key, which is left out without any."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device + 1)]
        traces[self.device] = list(self._trace)
        content: dict[str, Any] = {
            "segments": [self._segment(segment) for segment in self._segments],
            "device_traces": traces,
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": [],
        }
        if own:
            content["torch_memory_saver"] = {
                "format": 1,
                "pid": 1,
                "role": "",
                "tag": "",
                "time_ns": 1,
                "history": {"enabled": self.recording, "host": False},
                "segments": [],
                "devices": [],
            } | own
        return content

    def write(self, path: Path, **own: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(self.snapshot(**own), protocol=4))
        return path

    def _find(self, size: int) -> tuple[_Segment, _Block] | None:
        kind = "small" if size <= _SMALL else "large"
        free = [
            (block.size, block.address, segment, block)
            for segment in self._segments
            if segment.kind == kind
            for block in segment.blocks
            if block.state == "inactive" and block.size >= size
        ]
        return min(free, key=lambda one: one[:2])[2:] if free else None

    def _reserve(self, size: int, calls: tuple[Call, ...]) -> tuple[_Segment, _Block]:
        kind = "small" if size <= _SMALL else "large"
        reserved = (
            _SMALL_SEGMENT if kind == "small" else _LARGE_SEGMENT if size < _LARGE else -(-size // (2 * MIB)) * 2 * MIB
        )
        segment = _Segment(self._next_address, reserved, kind, [_Block(self._next_address, reserved)])
        self._next_address += reserved + 2 * MIB
        self._segments.append(segment)
        self._record("segment_alloc", segment.address, reserved, calls)
        return segment, segment.blocks[0]

    def _merge(self, segment: _Segment, at: int) -> None:
        for left in (at, at - 1):
            if left >= 0 and left + 1 < len(segment.blocks):
                first, second = segment.blocks[left : left + 2]
                if first.state == second.state == "inactive":
                    first.size += second.size
                    del segment.blocks[left + 1]

    def _record(self, action: str, address: int, size: int, calls: tuple[Call, ...]) -> None:
        if self.recording:
            self._trace.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": self._frames(calls)})
            del self._trace[: -self._max_entries]

    def _frames(self, calls: tuple[Call, ...]) -> list[dict[str, Any]]:
        return self._stacks.setdefault(calls, frames_of(*calls))

    def _blocks(self) -> list[_Block]:
        return [block for segment in self._segments for block in segment.blocks]

    def _segment(self, segment: _Segment) -> dict[str, Any]:
        return {
            "device": self.device,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(block.size for block in segment.blocks if block.state == "active_allocated"),
            "active_size": sum(block.size for block in segment.blocks if block.state != "inactive"),
            "stream": 0,
            "segment_type": segment.kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": block.state,
                    "frames": block.frames or [],
                }
                for block in segment.blocks
            ],
        }
