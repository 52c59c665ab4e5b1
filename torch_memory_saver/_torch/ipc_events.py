"""The events on which an importer waits before it reads what was sent.

An event is recorded on the current stream when a tensor is sent, and the importer's stream waits for it. PyTorch makes a new
event for each tensor, and at most 1000 of them. Here a stream has one event, which is recorded again at each send. That is
enough: a wait for the event waits for its latest record, and on one stream a later record is reached after an earlier one
(CUDA's documentation of cuStreamWaitEvent and of interprocess events).

Streams that PyTorch owns are never destroyed, and there are few. A stream from elsewhere may be destroyed and its address
used again, so each send on it has an event of its own, which is kept for as long as what was sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Recorded", "StreamEvents"]


class Recorded(NamedTuple):
    """An event that was recorded.

    Attributes:
        handle: What importers open.
        event: Keep it for as long as an importer may open the handle.
    """

    handle: bytes
    event: Any


class _OfStream(NamedTuple):
    stream: Any
    recorded: Recorded


class StreamEvents:
    """The events of this process. Any thread; no lock: a stream's event is set by a single operation of a dict."""

    def __init__(self) -> None:
        self._events: dict[tuple[int, ...], _OfStream] = {}  # by device and PyTorch's id of the stream

    def record(self, torch: Any, device: int) -> Recorded:
        """Records an event on the current stream of the device."""
        key: tuple[int, ...] = torch._C._cuda_getCurrentStream(device)
        known = self._events.get(key)
        if known is not None:
            known.recorded.event.record(known.stream)
            return known.recorded
        made = self._make(torch, device)
        if not _is_external(key[0]):
            self._events.setdefault(key, made)
        return made.recorded

    @staticmethod
    def _make(torch: Any, device: int) -> _OfStream:
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event(interprocess=True)
        event.record(stream)
        return _OfStream(stream, Recorded(event.ipc_handle(), event))


def _is_external(stream_id: int) -> bool:
    """Whether a stream does not belong to PyTorch. Its id is a pointer then, which is even; PyTorch's own ids are odd, and 0
    is the default stream (c10/cuda/CUDAStream.cpp)."""
    return stream_id != 0 and stream_id % 2 == 0
