"""The reader of snapshot files, which runs nothing in a file and makes the model from its content.

The pickle may hold plain values only. `parse` accepts the shapes of PyTorch 2.0 to 2.15. Release 2.0 keeps a block's stack
in its "history", gives no "requested_size" and calls a state "active_pending_free". Before 2.1 blocks have no address, so
the address follows from their order in the segment. Keys that are not known here are ignored. A file that lacks a key which
every release has, or that has a value of another kind in it, raises an error that `load_snapshot` explains. Numbers are
whole and have 64 bits, so that the users of the model can calculate with them.

The module owns the file, its errors, and the knowledge of PyTorch's keys. It has no state and no lock. Any thread may call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from torch_memory_saver._stacks import CallStacks, whole_number
from torch_memory_saver.errors import InvalidArgumentError

from .model import Block, BlockState, Event, ManagedSegment, Segment, Snapshot

__all__ = ["KEY", "load_snapshot", "parse"]

#: The top-level key of the part that this package adds to PyTorch's snapshot, and the known formats of that part.
KEY = "torch_memory_saver"
_FORMATS = (1,)
_STATES = {
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.AWAITING_FREE,
    "active_awaiting_free": BlockState.AWAITING_FREE,
    "inactive": BlockState.INACTIVE,
}
#: The pieces in which PyTorch maps expandable segments, by the type of the segment, in bytes.
_PIECES = {"small": 2 << 20, "large": 20 << 20}
#: Id of PyTorch's default pool. Private pools have other ids.
_DEFAULT_POOL = (0, 0)
#: Exceptions that `pickle` raises for a file that is no pickle, or that ends early.
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
#: Exceptions that `parse` raises for values that are no snapshot.
_UNKNOWN_SHAPE = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
#: Advice for a file that has other contents.
_WANTED = "give files that torch_memory_saver.observe.memory or torch.cuda.memory._dump_snapshot() has written"


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot of this package, or one that PyTorch wrote (torch.cuda.memory._dump_snapshot()).

    Nothing in the file is run: a pickle that names any class or function is refused. PyTorch is not needed.

    Args:
        path: The file.

    Raises:
        InvalidArgumentError: The file cannot be read, is cut off, holds more than plain values, or is no snapshot. The
            message names the file and says what to do.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = _unpickle(file)
    except OSError as error:
        advice = "Check the path; `run --record snapshots` makes a snapshot before each pause of the program"
        raise _error(name, f"cannot be read ({error.strerror}). {advice}") from error
    except _RefusedGlobal as error:
        advice = "a snapshot needs none, so the file is not loaded: do not use a file from a source that you do not trust"
        raise _error(name, f"names {error}, a class or a function: {advice}") from error
    except EOFError as error:
        raise _error(
            name, "is empty or cut off: its process may have ended while writing; take the snapshot again"
        ) from error
    except _UNREADABLE as error:
        # The C unpickler calls a cut in the middle of a value "truncated".
        if "truncated" in str(error):
            raise _error(name, "is cut off: its process may have ended while writing; take the snapshot again") from error
        raise _error(name, f"is no snapshot, because it is no pickle of plain values: {_WANTED}") from error
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise _error(name, f'is a pickle, but no snapshot (it has no list "segments"): {_WANTED}')
    try:
        return parse(content, name)
    except _UNKNOWN_SHAPE as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise _error(name, f"is not a snapshot that this release can read ({what}): {_WANTED}") from error


def parse(content: Mapping[str, Any], source: str) -> Snapshot:
    """Return the snapshot that the content of a file describes.

    Args:
        content: PyTorch's snapshot, with this package's key or without.
        source: The name of the file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError: The content is no snapshot.
            The text says what is wrong.
    """
    ours = content.get(KEY) or {}
    if ours and ours["format"] not in _FORMATS:
        raise ValueError(f"its format is {ours['format']!r}, and this release reads {_FORMATS[0]}: install a newer one")
    stacks = CallStacks()
    managed = _managed(ours)
    events = {device: tuple(_events(trace, stacks)) for device, trace in enumerate(content.get("device_traces") or ())}
    allocated = {(device, event.address) for device, trace in events.items() for event in trace if event.action == "alloc"}
    by_place = {(row.device, row.address): row for row in managed}
    segments = [_segment(row, stacks, allocated, by_place) for row in content["segments"]]
    return Snapshot(
        source=source,
        segments=tuple(sorted(segments, key=lambda segment: (segment.device, segment.address))),
        events=events,
        managed=managed,
        role=_text(ours.get("role")),
        rank=_number(ours.get("rank")),
        pid=_number(ours.get("pid")),
        tag=_text(ours.get("tag")),
        step=_number(ours.get("step")),
        pausing=tuple(map(_text, ours["pausing"])) if "pausing" in ours else None,
        time_ns=_number(ours.get("time_ns")) or 0,
        started_ns=_number(ours.get("started_ns")) or 0,
        history_enabled=bool(ours["history"]["enabled"]) if "history" in ours else None,
    )


class _RefusedGlobal(Exception):
    """The error for a pickle that names a class or a function."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes dicts, lists, tuples, texts and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise _RefusedGlobal(f"{module}.{name}")


def _unpickle(file: BinaryIO) -> Any:
    return _PlainUnpickler(file).load()


def _error(name: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"load_snapshot: {name} {what}.", operation="load_snapshot")


def _events(trace: Iterable[Mapping[str, Any]], stacks: CallStacks) -> Iterable[Event]:
    for row in trace:
        # An "oom" has no address.
        yield Event(
            _text(row["action"]),
            whole_number(row.get("addr", 0)),
            whole_number(row.get("size", 0)),
            stacks.get(row.get("frames"), recorded=True),
        )


def _segment(
    row: Mapping[str, Any],
    stacks: CallStacks,
    allocated: set[tuple[int, int]],
    managed: Mapping[tuple[int, int], ManagedSegment],
) -> Segment:
    device, address = whole_number(row["device"]), whole_number(row["address"])
    blocks, next_address = [], address
    for entry in row["blocks"]:
        block = _block(entry, next_address, device, stacks, allocated)
        blocks.append(block)
        next_address = block.address + block.bytes
    ours = managed.get((device, address))
    return Segment(
        address=address,
        bytes=whole_number(row["total_size"]),
        device=device,
        pool=_pool(row.get("segment_pool_id", _DEFAULT_POOL)),
        blocks=tuple(blocks),
        piece_bytes=_PIECES[_text(row["segment_type"])] if row.get("is_expandable") else 0,
        state=ours.state if ours else "",
        tag=ours.tag if ours else "",
    )


def _block(
    row: Mapping[str, Any], next_address: int, device: int, stacks: CallStacks, allocated: set[tuple[int, int]]
) -> Block:
    address, size = whole_number(row.get("address", next_address)), whole_number(row["size"])
    state = _STATES.get(_text(row["state"]))
    if state is None:
        raise ValueError(f"a block has the state {row['state']!r}, which this release does not know")
    frames, requested = row.get("frames"), row.get("requested_size")
    if row.get("history"):  # PyTorch 2.0, newest first
        newest = row["history"][0]
        frames, requested = frames or newest.get("frames"), newest.get("real_size", requested)
    live = state is not BlockState.INACTIVE
    stack = stacks.get(frames if live else None, recorded=live and (device, address) in allocated)
    return Block(address, size, size if requested is None else whole_number(requested), state, stack)


def _managed(ours: Mapping[str, Any]) -> tuple[ManagedSegment, ...]:
    return tuple(
        ManagedSegment(
            whole_number(row["address"]),
            whole_number(row["bytes"]),
            whole_number(row["device"]),
            _text(row["state"]),
            _text(row["tag"]),
        )
        for row in ours.get("segments", ())
    )


def _text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value or ""


def _number(value: object) -> int | None:
    return None if value is None else whole_number(value)


def _pool(value: Iterable[object]) -> tuple[int, int]:
    first, second = map(whole_number, value)
    return first, second
