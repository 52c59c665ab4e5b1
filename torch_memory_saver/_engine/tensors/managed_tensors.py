"""manage(): moving tensors that already exist into managed memory.

A storage is moved by ``UntypedStorage.resize_`` to its own size inside a region. In one call of C++ code, PyTorch allocates
new memory from the pool of the region, copies the contents on the current stream, and puts the new memory into the same
storage. So every tensor with this storage has moved as well, and an allocation that fails leaves the storage as it was.

The old memory goes to PyTorch's cache, and from there to the driver. Emptying the cache for each storage would be slow. So
it is emptied at the beginning and at the end, and before the moved bytes that may still be cached, together with the next
storage, exceed the largest storage by 16 MiB. PyTorch releases whole segments only: storages are moved in the order of their
addresses, so that at most one segment is partly moved, of 20 MiB if its storages are small. The last segment of the new
memory may have 20 MiB to spare. So the peak is at most the largest storage and 64 MiB, unless PyTorch has placed storages in
larger segments or beside tensors that stay, or another thread is inside a region, because PyTorch releases nothing then.

All devices concerned are waited for before and after. The old memory is recorded as used by the current stream, so that no
other thread gets it before the copy has ended. No capture may be active, and none begins: see ``capture_gate``.

The state of an optimizer is looked at after each of its steps. The optimizers that hold the state are found, and unknown
wrappers are refused, before anything is moved (optimizers.py). A step that adds nothing costs one comparison of addresses.
The list of optimizers belongs to this process. Any thread may call; two threads must not move the same tensors at once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._engine.background import explain
from torch_memory_saver._engine.region import Region
from torch_memory_saver._engine.tensors.lookup import storages_of
from torch_memory_saver._engine.tensors.managed_modules import ManagedModules
from torch_memory_saver._engine.tensors.movable import (
    Movable,
    find_movable,
    flat,
    not_in_place,
    refuse_others_memory,
    refuse_saved,
    tensors_in,
)
from torch_memory_saver._engine.tensors.optimizers import find_optimizers
from torch_memory_saver._text import binary_size, counted, warn_once
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver._torch.binding.layer import TorchCuda, eager_methods
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.errors import (
    CaptureInProgressError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    make_error,
)
from torch_memory_saver.options import RegionOptions

__all__ = ["ManageHandle", "manage"]

#: Moved bytes that may stay in PyTorch's cache beside the largest storage.
_CACHED_BYTES = 16 << 20


@eager_methods
class ManageHandle:
    """The result of :meth:`TorchMemorySaver.manage`.

    Attributes:
        moved_bytes: Bytes of the storages that were moved so far, by the call and by steps of its optimizers.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._followers: list[_Follower] = []
        self._is_removed = False

    def __repr__(self) -> str:
        number = sum(follower.is_active for follower in self._followers)
        followed = f", follows {counted(number, 'optimizer')}" if number else ""
        removed = "removed: " if self._is_removed else ""
        return f"<ManageHandle: {removed}moved {binary_size(self.moved_bytes)} to managed memory{followed}>"

    def remove(self) -> None:
        """Stop moving the new state of the optimizers.

        Memory that was moved stays managed. Without an optimizer, and in a second call, this method does nothing.
        """
        for follower in self._followers:
            follower.remove()
        self._is_removed = True


def manage(store: PoolStore, modules: ManagedModules, what: Any, options: RegionOptions) -> ManageHandle:
    """Move what is given into memory with the options, and return the handle. See :meth:`TorchMemorySaver.manage`."""
    torch = layer.require()
    objects = flat(torch.torch, what)
    handle = ManageHandle()
    found = not_in_place(find_movable(torch.torch, objects), options)
    optimizers = [each for each in objects if isinstance(each, torch.torch.optim.Optimizer)]
    _refuse_followed(torch.torch, found, options, optimizers)
    handle._followers = [_Follower(store, options, handle) for _ in optimizers]
    try:
        for follower, optimizer in zip(handle._followers, optimizers, strict=True):
            follower.begin(torch.torch, optimizer)
        if found:
            _refuse_captures(torch)
            refuse_others_memory(torch, store, found)
            refuse_saved(torch.torch, found, objects)
            _warn_of_graphs(torch.torch)
            _move(torch, store, options, found, handle)
    except BaseException:
        handle.remove()
        raise
    for follower, optimizer in zip(handle._followers, optimizers, strict=True):
        if optimizer in _followers:
            _followers[optimizer].remove()
        _followers[optimizer] = follower
    for each in objects:
        if isinstance(each, torch.torch.nn.Module):
            modules.add(torch.torch, each, options)
    return handle


def _refuse_followed(torch: Any, found: Sequence[Movable], options: RegionOptions, optimizers: Sequence[Any]) -> None:
    """Refuse state of an optimizer that an earlier call follows with other options: its next step would move it back."""
    names = {each.storage._cdata: each.name for each in found}
    for optimizer, follower in list(_followers.items()) if found else ():
        if not follower.is_active or any(optimizer is each for each in optimizers) or follower.wants(options):
            continue
        for storage in storages_of(torch, tensors_in(torch, optimizer.state.values())):
            if storage._cdata in names:
                raise InvalidArgumentError(
                    f"manage: {names[storage._cdata]} is state of {type(optimizer).__name__}, whose steps move it to memory "
                    f"with tag {follower.tag!r}, as an earlier call of manage() requests. Pass the optimizer instead of "
                    "its state, or call remove() of the handle of that call first. Nothing was moved.",
                    operation="manage",
                    tag=options.tag,
                )


def _warn_of_graphs(torch: Any) -> None:
    """Warn if there are captured graphs: they may have the old addresses of what is moved."""
    if any(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects()):
        warn_once(
            "manage with captured graphs",
            "manage: there are captured CUDA graphs. A graph that uses a tensor that is moved keeps its old address, so its "
            "replays would read memory that is not the tensor's any more. Capture such graphs again.",
        )


def _move(
    torch: TorchCuda, store: PoolStore, options: RegionOptions, found: Sequence[Movable], handle: ManageHandle
) -> None:
    devices = sorted({each.device for each in found})
    with Region(store, lambda: torch, options), capture_gate.held():
        _refuse_captures(torch)
        for device in devices:
            torch.synchronize(device)
        store.empty_cache(torch)
        _move_each(torch, store, options, found, handle)
        store.empty_cache(torch)
        for device in devices:
            torch.synchronize(device)


def _move_each(
    torch: TorchCuda, store: PoolStore, options: RegionOptions, found: Sequence[Movable], handle: ManageHandle
) -> None:
    """Move storages inside a region."""
    most = max(each.bytes for each in found) + _CACHED_BYTES
    cached = 0
    for number, each in enumerate(found):
        if cached and cached + each.bytes > most:
            store.empty_cache(torch)
            cached = 0
        try:
            _move_one(torch, store, each)
        except torch.torch.OutOfMemoryError as error:
            raise _out_of_memory(options, found, number) from error
        handle.moved_bytes += each.bytes
        cached += each.bytes
        row = _core.find(each.storage.data_ptr())
        if row is None or row.tag != options.tag:
            raise InvalidStateError(
                f"manage: {each.name} was moved, but its new memory is not managed. PyTorch's caching may be off "
                "(PYTORCH_NO_CUDA_MEMORY_CACHING, or caching_allocator_enable(False)): turn it on, or use hook mode "
                '"preload"',
                operation="manage",
                tag=options.tag,
                device=each.device,
            )


def _move_one(torch: TorchCuda, store: PoolStore, movable: Movable) -> None:
    storage = movable.storage
    alias = torch.torch.empty(0, dtype=torch.torch.uint8, device=storage.device).set_(storage)
    alias.record_stream(torch.torch.cuda.current_stream(movable.device))
    try:
        storage.resize_(movable.bytes)
    except torch.torch.OutOfMemoryError:
        store.empty_cache(torch)  # PyTorch does not do this itself while a pool is routed
        storage.resize_(movable.bytes)


def _refuse_captures(torch: TorchCuda) -> None:
    if _is_capturing(torch):
        raise CaptureInProgressError(
            "manage: a stream capture is active, during which memory cannot be moved: call manage() after it has ended. "
            "Nothing was moved.",
            operation="manage",
        )


def _is_capturing(torch: TorchCuda) -> bool:
    return bool(torch.is_capturing()) or bool(_core.counters()["visible_captures"])


def _out_of_memory(options: RegionOptions, found: Sequence[Movable], number: int) -> OutOfMemoryError:
    """Return the error for a lack of memory for one of the storages, before which all others were moved.

    The error says who holds the memory.
    """
    failed = found[number]
    free = binary_size(_core.device_memory(failed.device).free)
    moved = sum(each.bytes for each in found[:number])
    error = make_error(
        "OUT_OF_DEVICE_MEMORY",
        f"manage: device {failed.device} has too little memory for {failed.name} ({binary_size(failed.bytes)}), which stays "
        f"where it was: {free} are free. {number} of {len(found)} storages ({binary_size(moved)}) were moved and stay in "
        f"memory with tag {options.tag!r}. Free memory and call manage() again: it moves the rest.",
        "manage",
        "",
        "",
        0,
        0,
        failed.device,
        failed.bytes,
        failed.address,
        options.tag,
    )
    assert isinstance(error, OutOfMemoryError)
    explain(error, ())
    return error


@eager_methods
class _Follower:
    """The registration of one optimizer, whose new state it moves. It replaces an earlier one of the same optimizer."""

    def __init__(self, store: PoolStore, options: RegionOptions, handle: ManageHandle) -> None:
        self._store = store
        self._options = options
        self._handle = handle
        #: The optimizers that this one wraps, which have followers of their own.
        self._inner: list[weakref.ref[Any]] = []
        self._addresses: list[int] = []
        self._is_prepared = False
        self._has_stepped = False
        self._hooks: list[Any] = []

    def begin(self, torch: Any, optimizer: Any) -> None:
        """Register the hooks. If that fails half-way, remove() removes those that are registered."""
        self._inner = [weakref.ref(each) for each in find_optimizers(torch, optimizer) if each is not optimizer]
        for register, hook in (
            (optimizer.register_step_pre_hook, lambda optimizer, arguments, keywords: self._prepare(optimizer)),
            (optimizer.register_step_post_hook, lambda optimizer, arguments, keywords: self._step_ended(optimizer)),
            (optimizer.register_load_state_dict_post_hook, self._was_loaded),
        ):
            self._hooks.append(register(hook))

    @property
    def tag(self) -> str:
        return self._options.tag

    @property
    def is_active(self) -> bool:
        return bool(self._hooks)

    def wants(self, options: RegionOptions) -> bool:
        """Return whether it moves state to memory with the same tag and backup."""
        return (self._options.tag, self._options.backup) == (options.tag, options.backup)

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _prepare(self, optimizer: Any) -> None:
        """Empty PyTorch's cache once, before the step that makes the state.

        Otherwise PyTorch places state in large segments of freed activations, and a segment is not released before all of
        the state in it has moved.
        """
        torch = None if optimizer.state or self._is_prepared else layer.in_use()
        if torch is not None:
            with capture_gate.held():
                if not _is_capturing(torch):
                    self._is_prepared = True
                    self._store.empty_cache(torch)

    def _step_ended(self, optimizer: Any) -> None:
        self._look_at(optimizer)
        if not self._has_stepped:
            self._has_stepped = True
            self._warn_of_no_state(optimizer)

    def _warn_of_no_state(self, optimizer: Any) -> None:
        """Log a warning after a first step that made no state. Steps of inner optimizers have their own warnings."""
        torch = layer.in_use()
        has_parameters = any(group["params"] for group in optimizer.param_groups)
        if torch is None or self._inner or not has_parameters or tensors_in(torch.torch, optimizer.state.values()):
            return
        kind = type(optimizer).__name__
        warn_once(
            f"no state of {kind}",
            "manage: the first step() of %s has made no state, so nothing of it is managed with tag %r. If it keeps tensors "
            "outside of its state, pass them to manage(). State of a later step is moved after that step.",
            kind,
            self._options.tag,
        )

    def _was_loaded(self, optimizer: Any) -> None:
        """Look at the optimizer, and at those that it wraps: it may have put state into them without their methods."""
        self._look_at(optimizer)
        for reference in self._inner:
            inner = reference()
            follower = _followers.get(inner) if inner is not None else None
            if follower is not None and follower.is_active:
                follower._look_at(inner)

    def _look_at(self, optimizer: Any) -> None:
        """Move the state that is not in place. During a capture nothing is moved: a later step does it."""
        torch = layer.in_use()
        if torch is None or _addresses_of(torch.torch, optimizer) == self._addresses or _is_capturing(torch):
            return
        found = not_in_place(find_movable(torch.torch, [optimizer]), self._options)
        if found:
            refuse_others_memory(torch, self._store, found)
            try:
                _move(torch, self._store, self._options, found, self._handle)
            except CaptureInProgressError:  # another thread has begun the capture since
                return
        self._addresses = _addresses_of(torch.torch, optimizer)


#: The registration of each optimizer.
_followers: MutableMapping[Any, _Follower] = weakref.WeakKeyDictionary()


def _addresses_of(torch: Any, optimizer: Any) -> list[int]:
    """Return the addresses of the optimizer's state, on every device."""
    address: Callable[[Any], int] = torch.UntypedStorage.data_ptr
    return list(map(address, storages_of(torch, tensors_in(torch, optimizer.state.values()))))
