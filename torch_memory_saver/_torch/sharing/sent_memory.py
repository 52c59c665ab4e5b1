"""Managed memory that is sent to other processes, and the hooks into PyTorch's functions for that.

CUDA refuses IPC handles for managed memory. :func:`install` wraps, once:

- ``UntypedStorage._share_cuda_``, which describes a storage for another process. Every way of sending a tensor calls it:
  queues, pipes, ``reduce_tensor`` and ``ForkingPickler``. Storages that are not managed are described as before.
- The reducer by which ``multiprocessing`` pickles tensors. A ``multiprocessing.Queue`` pickles on its own thread, which
  only prints an exception, so the receiver would wait for ever. There the message is replaced by one that raises the same
  error in the receiver's ``get()``.
- ``torch.cuda.ipc_collect``, which also releases what is kept here.

A tensor is sent with the description of its allocation's physical memory, which the importer maps, with a counter and with
an event, all in PyTorch's formats (ipc.py). So an importer that has nothing but PyTorch treats the tensor like any other.

The sender's block must not be used for another tensor while an importer reads it. So the storage is kept until the counter
has fallen, the memory is paused or the allocation is gone. Counters are looked at when more is sent, at each pause, and by
``torch.cuda.ipc_collect()`` and ``torch_memory_saver.empty_cache()``.

A pause does not wait for importers. They keep the physical memory that they have mapped, with its contents at the pause; the
resumed memory is another one, which has to be sent again.

A pause that refuses shared memory, or waits for importers, checks what was sent and then pauses. No send succeeds between
the two: a send is listed from before it asks for the memory until its storage is kept, and the check, under the same lock,
counts what is listed. If it finds nothing, it closes the tags, and later sends fail until the pause has ended.

No storage is released under `_lock`, because that calls PyTorch's allocator.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._text import binary_size
from torch_memory_saver._torch.base.steps import InterruptSafeLock, SingleUseScope
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver._torch.sharing.ipc import (
    CounterFile,
    Counters,
    Recorded,
    StreamEvents,
    describe,
    format_of_importer,
    format_of_own_description,
)
from torch_memory_saver.errors import CaptureInProgressError, InvalidStateError, TorchMemorySaverError
from torch_memory_saver.options import PauseOptions

__all__ = ["Share", "SharedMemory", "install"]

logger = logging.getLogger("torch_memory_saver")

Share = Callable[..., tuple[Any, ...]]
#: Counters are read again after this many tensors were sent. Until then, blocks that no importer uses are kept.
_COLLECT_AFTER = 1000
#: Seconds between two readings of the counters during a wait for importers. Nothing announces a change.
_POLL_SECONDS = 0.002


#: Indexes into the tuple that PyTorch's ``_share_cuda_`` returns: device, handle, size, offset, counter file, counter,
#: event's handle, whether importers wait for the event.
_HANDLE, _COUNTER_FILE, _COUNTER, _WAITS = 1, 4, 5, 7

#: The thread of a multiprocessing.Queue that pickles its items.
_FEEDER = "QueueFeederThread"
#: The row of the reducers in the table of replacements.
_REDUCERS = "multiprocessing.reduction.ForkingPickler._extra_reducers"


def install(torch: Any, shared: SharedMemory) -> None:
    """Wrap the functions, once. Do nothing while another thread is still importing torch: a later use installs them."""
    storage: Any = getattr(torch, "UntypedStorage", None)
    share = getattr(storage, "_share_cuda_", None)
    if share is None or is_replaced(storage, "_share_cuda_") or _is_being_imported(torch):
        return
    from multiprocessing.reduction import ForkingPickler  # slow, but torch has imported it already

    reducers: dict[type, Callable[[Any], Any]] = getattr(ForkingPickler, "_extra_reducers", {})

    def wrap() -> None:
        if is_replaced(storage, "_share_cuda_"):  # another thread was first
            return
        if not is_replaced(torch.cuda, "ipc_collect"):
            collect = _collecting_managed(torch.cuda.ipc_collect, shared)
            replace("torch.cuda.ipc_collect", torch.cuda, "ipc_collect", collect)
        for kind, reduce in list(reducers.items()):
            if reduce is torch.multiprocessing.reductions.reduce_tensor:
                replace(_REDUCERS, reducers, kind, _reaching_the_receiver(reduce))
        replace("torch.UntypedStorage._share_cuda_", storage, "_share_cuda_", _sending_managed(torch, share, shared))

    shared._lock.call(wrap)


def _is_being_imported(torch: Any) -> bool:
    return bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))


def _sending_managed(torch: Any, share: Share, shared: SharedMemory) -> Share:
    @functools.wraps(share)
    def _share_cuda_(storage: Any, *arguments: Any, **keywords: Any) -> Any:
        row = _core.find(storage.data_ptr())
        if row is None:
            return share(storage, *arguments, **keywords)
        return shared.send(torch, share, storage, row)

    return _share_cuda_


def _collecting_managed(collect: Callable[[], Any], shared: SharedMemory) -> Callable[[], Any]:
    @functools.wraps(collect)
    def ipc_collect() -> Any:
        shared.collect()
        return collect()

    return ipc_collect


def _reaching_the_receiver(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(reduce)
    def reduce_tensor(tensor: Any) -> Any:
        try:
            return reduce(tensor)
        except TorchMemorySaverError as error:
            if threading.current_thread().name != _FEEDER:
                raise
            logger.error("a message put into a multiprocessing.Queue cannot be sent, and its get() will raise: %s", error)
            return _raise, (error,)

    return reduce_tensor


def _raise(error: BaseException) -> NoReturn:
    """Raise the error. Called when the receiver unpickles the message."""
    raise error


#: Where exported memory begins, and the number of its pieces.
_Place = tuple[int, int]


def _place(exported: tuple[_core.Export, ...]) -> _Place:
    return exported[0].address, len(exported)


def _export(address: int, end: int) -> tuple[_core.Export, ...]:
    """Export the memory from an address of an allocation up to `end`."""
    exported = [_core.export_memory(address)]
    while exported[-1].address + exported[-1].bytes < end:
        exported.append(_core.export_memory(exported[-1].address + exported[-1].bytes))
    return tuple(exported)


class _Sent(NamedTuple):
    """One storage that was sent, kept for as long as the counter says that it is in use."""

    storage: Any
    counter_file: CounterFile
    counter: int
    event: Recorded


@dataclass
class _Memory:
    """A piece of physical memory, of one allocation or of neighbours (csrc/core/model/run.h), or several pieces of an
    expandable segment, with the storages that were sent of it. It ends with a pause of the tag (its epoch advances)."""

    exported: tuple[_core.Export, ...]  # side by side, and of the same size
    tag: str
    epoch: int
    descriptions: dict[int, bytes] = field(default_factory=dict)  # by format
    sent: list[_Sent] = field(default_factory=list)

    def describe(self, layout: int, nonce: bytes) -> bytes:
        return self.descriptions.setdefault(layout, describe(layout, self.exported, nonce))


class SharedMemory:
    """The memory that this process has sent to other processes. Any thread may call.

    Args:
        ordinary_memory: A context manager in which this thread's allocations are not managed.

    Attributes:
        nonce: Random bytes that identify this process in descriptions. Process ids are used again, so they cannot
            distinguish two processes for ever.
    """

    def __init__(self, ordinary_memory: Callable[[], AbstractContextManager[None]]) -> None:
        self._ordinary_memory = ordinary_memory
        self.nonce = os.urandom(8)
        self._counters = Counters()
        self._events = StreamEvents()
        # It is held while the functions are wrapped as well. Reentrant, because the main thread's pending call
        # (_engine/preloaded.py) may interrupt that.
        self._lock = InterruptSafeLock()
        self._memory: dict[_Place, _Memory] = {}
        self._own_format: int | None = None
        self._is_tested = False
        self._sending: dict[object, _core.Segment] = {}  # by call
        self._closed: dict[object, Tags] = {}  # by call
        self._sends_until_collect = _COLLECT_AFTER
        #: The release of the importers' PyTorch; None: the release of this process.
        self.importer: str | None = None

    def after_fork_in_child(self) -> None:
        """Begin without sent memory. What the parent has sent is kept: it belongs to the parent, and must not be released
        here."""
        inherited, importer = (self._memory, self._counters, self._events), self.importer
        self.__init__(self._ordinary_memory)  # type: ignore[misc]
        self._inherited, self.importer = inherited, importer

    # Sending

    def send(self, torch: Any, share: Share, storage: Any, row: _core.Segment) -> tuple[Any, ...]:
        """Return the result of ``_share_cuda_`` for a storage in the managed allocation `row`.

        Raises:
            InvalidStateError: The memory is not resident, or about to be paused; PyTorch's format is not known; no file
                descriptor or no shared memory is free.
            CaptureInProgressError: A capture is under way: it would record the event that is sent.
        """
        fields: tuple[Any, ...] = _core.within(_Sending(self, row), self._send, torch, share, storage, row)
        return fields

    def begin_send(self, call: object, row: _core.Segment) -> None:
        """List a call as sending."""
        self._lock.call(self._begin_send, call, row)

    def _begin_send(self, call: object, row: _core.Segment) -> None:
        if self._closed and any(selects(tags, row.tag) for tags in self._closed.values()):
            raise InvalidStateError(
                "share: this memory is being paused. Share it after its resume",
                operation="share",
                tag=row.tag,
                device=row.device,
            )
        self._sending[call] = row

    def end_send(self, call: object) -> None:
        """Undo :meth:`begin_send`. May be repeated."""
        self._lock.call(self._sending.pop, call, None)

    def _take_counter(self) -> tuple[CounterFile, int]:
        return self._lock.call(self._counters.take)

    def _send(self, torch: Any, share: Share, storage: Any, row: _core.Segment) -> tuple[Any, ...]:
        if _is_capturing(torch, row.device):
            raise CaptureInProgressError(
                "share: a tensor cannot be sent while the current stream is being captured, because an event of that "
                "stream is sent with it. Share it before or after the capture",
                operation="share",
            )
        exported = _export(row.address, storage.data_ptr() + storage.nbytes())
        memory = self._memory.get(_place(exported))
        if memory is None or memory.exported != exported:
            memory = _Memory(exported, row.tag, _core.tag_info(row.tag).epoch)
        own = self._own_format or self._find_own_format(torch, share, row.device)
        layout = own if self.importer is None else format_of_importer(self.importer)
        handle = memory.descriptions.get(layout) or memory.describe(layout, self.nonce)
        counter = self._take_counter()  # after the checks, because a refused send must not use one up
        event = self._events.record(torch, row.device)
        offset = storage.data_ptr() - exported[0].address
        result = (row.device, handle, storage.nbytes(), offset, counter[0].name, counter[1], event.handle, True)
        if layout == own and not self._is_tested:
            self._test(torch, result)
        self._keep(memory, _Sent(storage, *counter, event))
        return result

    def _find_own_format(self, torch: Any, share: Share, device: int) -> int:
        """Return the format of this process's PyTorch, by what it says of ordinary memory."""
        make = functools.partial(torch.UntypedStorage, 1, device=torch.device("cuda", device))
        storage = _core.within(self._ordinary_memory(), make)
        fields = share(storage)
        torch.UntypedStorage._release_ipc_counter_cuda(fields[_COUNTER_FILE], fields[_COUNTER])  # nobody will import it
        self._own_format = format_of_own_description(fields[_HANDLE])
        return self._own_format

    def _test(self, torch: Any, fields: tuple[Any, ...]) -> None:
        """Import a description in this process, once, because an importer in another process would fail in its own way. The
        test also checks that the counter falls when the import is dropped."""
        counter_file, counter = self._take_counter()
        arguments = list(fields)
        arguments[_COUNTER_FILE], arguments[_COUNTER], arguments[_WAITS] = counter_file.name, counter, False
        try:
            torch.UntypedStorage._new_shared_cuda(*arguments)
        except RuntimeError as error:
            raise InvalidStateError(
                f"share: PyTorch {torch.__version__} does not import the description of managed memory that was made for "
                f"it ({str(error).splitlines()[0]}). Send tensor.cpu(), or a copy made inside disable()",
                operation="share",
            ) from error
        if counter_file.is_in_use(counter):
            logger.warning(
                "share: PyTorch %s does not count the receivers of a tensor as expected. So memory of sent tensors is not "
                "used again before the next pause, and possibly_shared_bytes is too large. (Logged once.)",
                torch.__version__,
            )
        self._is_tested = True

    def _keep(self, memory: _Memory, sent: _Sent) -> None:
        replaced: list[_Memory] = []  # outlives the lock
        if self._lock.call(self._add, memory, sent, replaced):
            self.collect()

    def _add(self, memory: _Memory, sent: _Sent, replaced: list[_Memory]) -> bool:
        """Keep what was sent. Return whether the counters are due to be read. The caller holds the lock."""
        place = _place(memory.exported)
        earlier = self._memory.get(place)
        if earlier is None or earlier.exported != memory.exported:
            replaced += [] if earlier is None else [earlier]  # of an earlier generation
            self._memory[place] = memory
        else:
            memory = earlier  # of another thread, perhaps, that has sent of the same memory since then
        memory.sent.append(sent)
        self._sends_until_collect -= 1
        return self._sends_until_collect <= 0

    # Memory that importers still use

    def collect(self) -> None:
        """Forget the storages that no importer uses, so that PyTorch may use their blocks again."""
        released: list[Any] = []  # outlives the lock
        self._lock.call(self._forget, released)

    def _forget(self, released: list[Any]) -> None:
        """Move the storages that no importer uses to `released`. The caller holds the lock."""
        self._sends_until_collect = _COLLECT_AFTER
        for place, memory in list(self._memory.items()):
            if self._has_ended(memory):
                released.append(self._memory.pop(place, None))
                continue
            in_use = [sent for sent in memory.sent if sent.counter_file.is_in_use(sent.counter)]
            released.append(memory.sent)
            memory.sent = in_use
            if not in_use:
                self._memory.pop(place, None)

    @staticmethod
    def _has_ended(memory: _Memory) -> bool:
        # What was sent is kept, so its allocation is not freed by PyTorch; others in the same memory may be.
        row = _core.find(memory.sent[0].storage.data_ptr()) if memory.sent else None
        return row is None or row.state != _core.STATE_ACTIVE or _core.tag_info(memory.tag).epoch != memory.epoch

    def closed(self, tags: Tags, deadline: float) -> AbstractContextManager[int]:
        """Return a context manager around a pause that other processes must not hold up. Its entry waits until they use no
        memory of the tags, at most until the deadline, in seconds of :func:`time.monotonic`. Its result is
        `possibly_shared_bytes`: if that is 0, nothing of the tags is sent until the end of the block.
        """
        return _Closed(self, tags, deadline)

    def close(self, call: object, tags: Tags) -> int:
        """Close the tags if `possibly_shared_bytes`, which it returns, is 0."""
        self.collect()
        return self._lock.call(self._close, call, tags)

    def _close(self, call: object, tags: Tags) -> int:
        left = self._shared_bytes(tags)
        if not left:
            self._closed[call] = tags
        return left

    def reopen(self, call: object) -> None:
        """Undo :meth:`close`. May be repeated."""
        self._lock.call(self._closed.pop, call, None)

    def awaited(self, options: PauseOptions) -> AbstractContextManager[int]:
        """Return a context manager around a pause. Its result is the bytes that other processes may still use when the pause
        begins. If the options do not allow any, none is sent until the pause has ended.

        Raises:
            InvalidStateError: Other processes may still use some bytes, and the options do not allow that. Raised at the
                entry.
        """
        if options.if_shared == "allow":
            return contextlib.nullcontext(self.possibly_shared_bytes(options.tags))
        return _Awaited(self, options)

    def possibly_shared_bytes(self, tags: Tags) -> int:
        """Return the bytes of the tags' physical memory that importers may still hold. An importer that uses a part of a
        piece keeps all of it. The number is an estimate: see ipc.py."""
        if not self._memory and not self._sending:
            return 0
        self.collect()
        return self._lock.call(self._shared_bytes, tags)

    def _shared_bytes(self, tags: Tags) -> int:
        """Return :meth:`possibly_shared_bytes`. The caller holds the lock."""
        sent = {piece for each in self._memory.values() if selects(tags, each.tag) for piece in each.exported}
        sending = {
            row.address: row.reserved_bytes
            for row in self._sending.values()
            if selects(tags, row.tag) and not any(0 <= row.address - each.address < each.bytes for each in sent)
        }
        return sum(each.bytes for each in sent) + sum(sending.values())


class _Sending(SingleUseScope):
    """A context manager around one send, which is listed inside it."""

    def __init__(self, shared: SharedMemory, row: _core.Segment) -> None:
        self._shared = shared
        self._row = row

    def _begin(self) -> None:
        self._shared.begin_send(self, self._row)

    def _end(self) -> None:
        self._shared.end_send(self)


class _Closed(SingleUseScope):
    """The context manager of :meth:`SharedMemory.closed`."""

    def __init__(self, shared: SharedMemory, tags: Tags, deadline: float) -> None:
        self._shared = shared
        self._tags = tags
        self._deadline = deadline

    def _begin(self) -> int:
        while True:
            left = self._shared.close(self, self._tags)
            remaining = self._deadline - time.monotonic()
            if not left or remaining <= 0:
                return left
            time.sleep(min(_POLL_SECONDS, remaining))

    def _end(self) -> None:
        self._shared.reopen(self)


class _Awaited(_Closed):
    """The context manager of :meth:`SharedMemory.awaited` for options that do not allow shared memory."""

    def __init__(self, shared: SharedMemory, options: PauseOptions) -> None:
        self._waits = options.if_shared == "wait"
        super().__init__(shared, options.tags, options.deadline if self._waits else 0.0)

    def _begin(self) -> int:
        left = super()._begin()
        if left:
            raise InvalidStateError(
                f"pause: other processes may still use {binary_size(left)} of this memory, which was sent to them"
                + (" and did not drop it within the timeout" if self._waits else "")
                + ". Let them drop their tensors (and call torch.cuda.ipc_collect() there), or pause with "
                'if_shared="allow": they then keep the memory, with its contents, until they drop it',
                operation="pause",
                bytes=left,
            )
        return left


def _is_capturing(torch: Any, device: int) -> bool:
    """Return whether the current stream of the device is capturing."""
    if torch._C._cuda_getDevice() == device:
        return bool(torch._C._cuda_isCurrentStreamCapturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
