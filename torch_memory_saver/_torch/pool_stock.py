"""PyTorch memory pools with this package's allocator: one for each entry of a region, by options and device.

A pool is *idle* (in the stock, not in use), *routed* (allocations of one thread come from it), or *retired* (torch releases
its segments as they empty). A pool can be routed by one thread at a time. While its object lives, none of its segments is
released to the driver. Destroying the object while a pool is routed on any thread ends the process, so the reference to
each object is leaked until :func:`retire` drops it. The end of an object that has another use does nothing since PyTorch
2.10, and ends the process before. Up to 2.9 the objects are therefore never destroyed: a retired pool leaks some hundred
bytes. Since 2.13 only a capture makes the end of an object end the process, and the end of an object without another use
releases what is idle in its pool.

A retired pool is never allocated from again. Free bytes in its partly used segments are *stranded*: nothing can use them
until the last tensor of the segment is deleted. So :func:`is_worth_retiring` compares what a retirement returns with what it
strands, for pauses, for the ends of regions, and for ``empty_cache()``.

A pool that may hold paused memory must not be entered, because torch would allocate from its free blocks. Each pool records
the number of pauses of its tag when it was last entered. If there were more since, and memory of the tag is still paused,
the pool stays idle.

Free blocks of a pool that no stream capture has used are dead (live.py). The stock lists these pools, including retired ones
until torch has released their memory, and removes a pool permanently once a capture may have used it.

PyTorch does not number its blocks: a tensor may have the place of a deleted one that was there at the last pause. But only
regions allocate from a pool that no capture has used. So while none has entered it since that pause, each tensor in its
memory was there (:meth:`PoolStock.has_tensors_of_last_pause`).

Lock: `_lock` guards the bookkeeping below and is never held across a call of torch, because torch's allocator calls the
native core with its own mutex held. pools.py, which decides what is routed where, uses the same lock.
:func:`retire` calls PyTorch, so no lock is held then.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch_memory_saver import _core
from torch_memory_saver._torch.captures import capture_gate
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.steps import OneUse, call_each
from torch_memory_saver.options import RegionOptions

__all__ = [
    "OBJECT_USES",
    "Key",
    "Pool",
    "PoolStock",
    "Tags",
    "TakenPools",
    "before_emptying",
    "has_idle_segment",
    "is_worth_retiring",
    "may_not_free",
    "measure_fill",
    "needs_emptying",
    "retire",
    "retire_at_emptying",
    "selects",
]

#: A selection of tags: None is every tag.
Tags = tuple[str, ...] | None

#: The maximum number of retired pools that are recorded, for programs that never pause.
_MOST_RETIRED = 10_000

#: The uses that PyTorch counts for a pool that nothing routes and no graph needs: that of its object.
OBJECT_USES = 1

#: Called at the beginning of ``empty_cache()`` with the mask of the devices in use. No lock is held then.
before_emptying: list[Callable[[int], None]] = []

#: The bytes that a pool may strand for any idle segments that are larger: PyTorch's smallest segments of large and of small
#: tensors, 20 MiB and 2 MiB, of which each pool with one tensor of each kind has one.
_SMALL_LOSS = 22 << 20


class Key(NamedTuple):
    """The key of an idle pool: the region's options and the device. Its fields are read by name. It is a tuple, because
    every entry of a region looks up one for each device."""

    options: RegionOptions
    device: int


def selects(tags: Tags, tag: str) -> bool:
    """Whether a pause or resume of `tags` selects `tag`."""
    return tags is None or tag in tags


class Fill(NamedTuple):
    """How full the segments of a pool are.

    Attributes:
        idle: Bytes of the segments without a tensor.
        free: Free bytes of the segments with a tensor.
        live: Whether there are segments with a tensor.
    """

    idle: int
    free: int
    live: bool


def measure_fill(segments: Iterable[Mapping[str, Any]]) -> Fill:
    """Return how full segments of PyTorch's snapshot are. A block that waits for a stream counts as a tensor."""
    idle = free = 0
    live = False
    for segment in segments:
        # No generators: an exception of a signal handler inside one would be dropped where it is closed.
        unused = sum([block["size"] for block in segment["blocks"] if block["state"] == "inactive"])
        if not [block for block in segment["blocks"] if block["state"] != "inactive"]:
            idle += segment["total_size"]
        else:
            free += unused
            live = True
    return Fill(idle, free, live)


def is_worth_retiring(fill: Fill, stranded: int) -> bool:
    """Decide whether a pool is to be retired: whether that returns more memory than it strands.

    A pool without a tensor is, if it holds memory. Another one is only if its idle segments are larger than its loss, which
    is the free bytes of its partly used segments and what earlier retirements have stranded. A loss of more than 22 MiB has
    to return twice as much: a program that uses a temporary in each region leaves an idle segment that is hardly larger than
    the free part of the segment in which it keeps the rest, and would otherwise strand that part in each cycle.

    Args:
        fill: How full the pool is.
        stranded: Free bytes of the retired pools of the same tag and device.
    """
    if not fill.live:
        return fill.idle > 0
    loss = fill.free + stranded
    return fill.idle > loss and (loss <= _SMALL_LOSS or fill.idle > 2 * loss)


class Pool:
    """One torch.cuda.MemPool with its key and state."""

    __slots__ = (
        "blocks",
        "bytes",
        "epoch",
        "frees",
        "fruitless",
        "id",
        "kept",
        "key",
        "listed",
        "live",
        "memory_pool",
        "retirement",
        "route",
        "unseen",
    )

    def __init__(self, memory_pool: Any, key: Key) -> None:
        self.memory_pool = memory_pool
        self.id: PoolId = memory_pool.id
        self.key = key
        self.route = key.device, self.id  # what PyTorch's routing functions take
        self.retirement: Iterator[functools.partial[Any]] | None = None  # the remaining steps
        self.epoch = 0  # number of pauses of the tag when this pool was last entered
        self.bytes = self.blocks = 0  # of its segments, and their blocks, at the last look for idle ones
        self.live = True  # whether it held a tensor when it was last decided whether to retire it
        self.fruitless = 0  # looks in a row since it has grown
        self.unseen = 0  # regions that have ended since the last look
        self.kept = 0  # bytes of idle segments that the last look of empty_cache() has left; 0 if it was entered since
        self.frees = 0  # frees of managed memory that the core had counted before that look
        self.listed: tuple[int, frozenset[int]] = -1, frozenset()  # number of a pause, and addresses of segments after it

    @property
    def device(self) -> int:
        return self.key.device

    def look(self, torch: TorchCuda) -> list[dict[str, Any]]:
        """Return PyTorch's segments of the pool, and note how many there are."""
        segments = torch.segments(self.id)
        size = sum([segment["total_size"] for segment in segments])
        self.fruitless = self.fruitless + 1 if size == self.bytes else 0
        self.bytes, self.blocks, self.unseen = size, sum([len(segment["blocks"]) for segment in segments]), 0
        return segments

    def had(self, torch: TorchCuda, address: int, epoch: int) -> bool:
        """Return whether a segment of the pool, which was not entered since, was at the address at pause number `epoch` of
        its tag. PyTorch is asked once for each pause, so a segment that was released since counts as well."""
        if self.listed[0] != epoch:
            self.listed = epoch, frozenset([segment["address"] for segment in torch.segments(self.id)])
        return address in self.listed[1]


class PoolStock:
    """The idle and retired pools of the process."""

    def _reset_stock(self) -> None:
        """Reset the state to that of a process without pools: at the start, and in a forked child, where torch cannot use
        them."""
        # Reentrant, because any allocation may run the garbage collector, and so a finalizer that enters a region.
        self._lock = threading.RLock()
        self._idle: dict[Key, list[Pool]] = {}
        self._doomed: list[Pool] = []  # to be retired at the next opportunity; appended to without the lock
        self._uncaptured: dict[PoolId, Pool] = {}  # pools of regions that no capture has used
        self._retired: dict[PoolId, Pool] = {}  # retired pools whose memory PyTorch may still hold

    def _take_idle(self, frame: Frame, devices: Sequence[int]) -> None:
        """Assign an idle pool of each device to a new frame, until there is none. The caller holds the lock."""
        options = frame.options
        info = _core.tag_info(options.tag)
        for device in devices:
            if not self._take_fitting(Key(options, device), info, frame.pools):
                return

    def check_out(self, torch: TorchCuda, key: Key) -> Pool:
        """Return a pool that is not in use and does not allocate from paused memory: an idle one, or a new one."""
        pools: list[Pool] = []
        self._check_out(torch, key, pools)
        return pools[0]

    def _check_out(self, torch: TorchCuda, key: Key, pools: list[Pool]) -> None:
        """Append such a pool to a list, so that a signal handler that raises does not lose it."""
        if not key.options.managed:
            pools.append(self.make_pool(torch, key))
            return
        info = _core.tag_info(key.options.tag)
        before = len(pools)
        _core.within(self._lock, functools.partial(self._take_fitting, key, info), pools)
        if len(pools) == before and info.paused:
            # An empty pool has no paused memory.
            for pool in self.idle_pools((key.options.tag,)):
                if pool.key == key and len(pools) == before and not torch.segments(pool.id):
                    _core.within(self._lock, self._take_one, (pool, pools))
        if len(pools) == before:
            made = self.make_pool(torch, key)
            self.note_uncaptured(made)
            pools.append(made)
        pools[-1].epoch = info.epoch
        pools[-1].kept = 0

    def _take_fitting(self, key: Key, info: _core.TagInfo, pools: list[Pool]) -> bool:
        """Append an idle pool that certainly has no paused memory. Return whether there is one. The caller holds the
        lock."""
        idle = self._idle.get(key)
        if not idle:
            return False
        index = -1
        if info.paused:
            current = [pool for pool in idle if pool.epoch == info.epoch]
            if not current:
                return False
            index = idle.index(current[-1])
        _core.move(idle, pools, index)
        pools[-1].epoch = info.epoch
        pools[-1].kept = 0
        return True

    def _take_one(self, wanted: tuple[Pool, list[Pool]]) -> None:
        """Append the pool, if it is still idle. The caller holds the lock."""
        pool, pools = wanted
        idle = self._idle.get(pool.key, [])
        if pool in idle:
            _core.move(idle, pools, idle.index(pool))

    def note_uncaptured(self, pool: Pool) -> None:
        """Record that no capture uses a new pool: its free blocks are dead."""
        self._uncaptured[pool.id] = pool

    def check_in(self, pool: Pool) -> None:
        """Make the pool idle again."""
        _core.within(self._lock, self._put_back, [pool])

    def _put_back(self, pools: list[Pool]) -> None:
        """Make the last pool of a list idle, and remove it from the list. The caller holds the lock."""
        _core.move(pools, self._idle.setdefault(pools[-1].key, []))

    def make_pool(self, torch: TorchCuda, key: Key) -> Pool:
        """Return a new pool. Its reference is leaked until it is retired."""
        return Pool(torch.make_pool(key.device, key.options.managed), key)

    def retire(self, torch: TorchCuda, pool: Pool) -> None:
        """Retires a pool that is not routed: torch releases its segments at an emptying after their last tensor is gone."""
        if pool.key.options.managed or pool.id in self._uncaptured:
            if len(self._retired) >= _MOST_RETIRED:
                self._forget_gone(torch)
            _core.within(self._lock, self._note_retired, pool)
        retire(torch, pool)

    def _note_retired(self, pool: Pool) -> None:
        """Record a retired pool. The caller holds the lock."""
        if len(self._retired) >= _MOST_RETIRED:
            self._forget(set(self._retired))
        self._retired[pool.id] = pool

    def retire_later(self, pool: Pool) -> None:
        """Mark a pool to be retired later. For finalizers, which may run even while the lock is held."""
        self._doomed.append(pool)

    def retire_doomed(self, torch: TorchCuda) -> None:
        """Retires the pools that finalizers and disable() left."""
        for pool in list(self._doomed):
            self.retire(torch, pool)
            with contextlib.suppress(ValueError):  # another thread has retired it as well
                self._doomed.remove(pool)

    def begin_emptying(self, torch: TorchCuda) -> int:
        """Prepare an emptying of PyTorch's cache. Return the mask of the devices in use."""
        in_use = _core.active_devices()
        for prepare in before_emptying:
            prepare(in_use)
        self.retire_doomed(torch)
        return in_use

    def retired_pools(self) -> frozenset[PoolId]:
        """Return the retired pools whose memory torch may still hold. torch releases it when its cache is emptied."""
        return frozenset(self._retired)

    def _strike_off(self, torch: TorchCuda, pools: Iterable[Pool]) -> None:
        """Record that captures may have used the pools."""
        captured = {pool.id for pool in pools}
        for pool in captured:
            self._uncaptured.pop(pool, None)
        torch.ordinary_pools -= captured

    def _forget(self, pools: set[PoolId]) -> None:
        """Forgets retired pools. The caller holds the lock."""
        for pool in pools:
            self._uncaptured.pop(pool, None)
            self._retired.pop(pool, None)

    def _forget_gone(self, torch: TorchCuda) -> list[dict[str, Any]]:
        """Forgets the retired pools whose memory PyTorch has released. Returns PyTorch's segments."""
        known = set(self._retired)
        segments = torch.segments()
        listed = {tuple(segment.get("segment_pool_id", ())) for segment in segments}
        _core.within(self._lock, self._forget, known - listed)
        return segments

    def stranded_bytes(self, torch: TorchCuda, tag: str | None = None, device: int | None = None) -> int:
        """Return the free bytes in partly used segments of retired pools, paused or not, which nothing can use until the
        last tensor of their segment is deleted. Takes no snapshot if no pool is retired.

        Args:
            torch: PyTorch.
            tag: The tag of the pools. None: pools of every tag.
            device: The device of the pools. None: pools of every device.
        """
        if not self._retired:
            return 0
        segments = self._forget_gone(torch)
        pools = {
            pool.id
            for pool in list(self._retired.values())
            if tag in (None, pool.key.options.tag) and device in (None, pool.device)
        }
        return measure_fill([segment for segment in segments if tuple(segment.get("segment_pool_id", ())) in pools]).free

    def has_tensors_of_last_pause(self, torch: TorchCuda, allocation: _core.Segment) -> bool:
        """Return whether every tensor in a resident allocation with a backup was there at the last pause of its tag. False
        if this is unknown: a region has entered the pool since, or not only regions allocate from the pool."""
        tag, device = allocation.tag, allocation.device
        epoch = _core.tag_info(tag).epoch
        pools = [pool for pool in list(self._uncaptured.values()) if pool.key.options.managed and pool.device == device]
        return any(
            pool.had(torch, allocation.address, epoch)
            for pool in pools
            if pool.key.options.tag == tag and pool.epoch < epoch and torch.uses_of(pool.memory_pool) <= OBJECT_USES
        )

    def retire_idle(self, torch: TorchCuda, pools: Iterable[Pool]) -> bool:
        """Retire those of the idle pools that are worth it. Return whether an emptying is needed to release their memory.
        Pools that have come into use are skipped."""
        # Most pools of an unused device are empty; this check is cheaper than a snapshot of each.
        pools = list(pools)
        devices = {device for device in {pool.device for pool in pools} if torch.releasable_bytes(device)}
        taken = TakenPools(self, [pool for pool in pools if pool.device in devices])
        return _core.within(taken, functools.partial(self.retire_taken, torch), taken)

    def retire_taken(
        self, torch: TorchCuda, taken: TakenPools, by_pool: Mapping[PoolId, list[dict[str, Any]]] | None = None
    ) -> bool:
        """Retire those of the taken pools that are worth it. Return whether an emptying is needed to release their memory.

        Args:
            torch: PyTorch.
            taken: The pools.
            by_pool: PyTorch's segments by pool; None: asks PyTorch for those of each pool.
        """
        retired = False
        for pool in list(taken.pools):
            if self.should_retire(torch, pool, segments=None if by_pool is None else by_pool.get(pool.id, [])):
                _core.move(taken.pools, self._doomed, taken.pools.index(pool))
                retired = True
        self.retire_doomed(torch)
        return retired and needs_emptying(torch)

    @staticmethod
    def has_idle_segment(torch: TorchCuda, pool: Pool) -> bool:
        """Whether retiring the pool gives memory back."""
        return has_idle_segment(torch.segments(pool.id))

    def should_retire(
        self,
        torch: TorchCuda,
        pool: Pool,
        uses: int = OBJECT_USES,
        segments: list[dict[str, Any]] | None = None,
    ) -> bool:
        """Whether a pool is to be retired. A pool that a captured graph uses never is: replays use blocks that PyTorch shows
        as free.

        Args:
            torch: PyTorch.
            pool: The pool.
            uses: How many uses PyTorch counts without graphs.
            segments: PyTorch's segments of the pool; None: asks PyTorch.
        """
        if torch.uses_of(pool.memory_pool) > uses:
            return False
        if torch.captures_join_regions and pool.id not in self._uncaptured:
            return False
        if segments is None:
            segments = pool.look(torch)
        if not [row for row in segments if not row["active_size"]] or not has_idle_segment(segments):
            return False
        fill = measure_fill(segments)
        pool.live = fill.live
        stranded = 0
        if fill.live and fill.idle > fill.free:
            stranded = self.stranded_bytes(torch, pool.key.options.tag, pool.device)
        return is_worth_retiring(fill, stranded)

    def idle_pools(self, tags: Tags = None) -> list[Pool]:
        """Return the idle pools of the tags, at this moment."""
        return [pool for key, pools in list(self._idle.items()) if selects(tags, key.options.tag) for pool in list(pools)]


class TakenPools(OneUse):
    """A context manager inside which the caller uses those of the given pools that were idle.

    Attributes:
        pools: The pools in use. Pools that are still in this list at the end become idle again.
    """

    def __init__(self, stock: PoolStock, wanted: Sequence[Pool]) -> None:
        self._stock = stock
        self._wanted = wanted
        self.pools: list[Pool] = []

    def _begin(self) -> None:
        for pool in self._wanted:
            _core.within(self._stock._lock, self._stock._take_one, (pool, self.pools))

    def _end(self) -> None:
        while self.pools:
            _core.within(self._stock._lock, self._stock._put_back, self.pools)


#: Makes the steps that retire a pool.
_Steps = Callable[[TorchCuda, "_Retirable"], list[functools.partial[Any]]]


class _Retirable(Protocol):
    """A pool that :func:`retire` accepts: a :class:`Pool`, or one of a watched device (late_devices.py)."""

    memory_pool: Any
    id: PoolId
    retirement: Iterator[functools.partial[Any]] | None

    @property
    def device(self) -> int: ...


def may_not_free(torch: TorchCuda) -> bool:
    """Whether a capture is active, or the device is lost. The native pause, which comes next and checks the same, raises the
    error."""
    try:
        return torch.is_capturing() or bool(_core.counters()["visible_captures"])
    except RuntimeError:
        return True


def needs_emptying(torch: TorchCuda) -> bool:
    """Whether the memory of a pool that is retired now waits for an emptying."""
    return torch.routing_spares_cache or _core.in_transition() or may_not_free(torch)


def retire(torch: TorchCuda, pool: _Retirable) -> None:
    """Retire a pool as :func:`retire_at_emptying` does.

    Since PyTorch 2.13 the segments that have no tensor are released at once, unless a capture is active, or this thread is
    inside a pause or resume, where the capture gate must not be taken.
    """
    if needs_emptying(torch):
        retire_at_emptying(torch, pool)
    else:
        _core.within(capture_gate.held(), functools.partial(_retire, torch, pool), _steps_with_release)


def retire_at_emptying(torch: TorchCuda, pool: _Retirable) -> None:
    """Retire a pool that is not routed: torch releases its segments at the next emptying after their last tensor is gone.
    A signal handler cannot divide a retirement (steps.py), and it may be repeated. Takes no lock."""
    _retire(torch, pool, _steps_of_retirement)


def _retire(torch: TorchCuda, pool: _Retirable, steps: _Steps) -> None:
    if pool.retirement is None:
        pool.retirement = iter(steps(torch, pool))
    call_each(pool.retirement)


def _steps_of_retirement(torch: TorchCuda, pool: _Retirable) -> list[functools.partial[Any]]:
    """Routing the pool once leaves it with one use besides the object's own, so the object can be destroyed even while other
    pools are routed; releasing that use then retires the pool. If destroying the object would end the process, the object's
    own use is released instead, and the object stays."""
    release = functools.partial(torch.release_pool, pool.device, pool.id)
    if not torch.pool_objects_end_quietly:
        return [functools.partial(setattr, pool, "memory_pool", None), release]
    return [
        functools.partial(torch.begin_routing, pool.device, pool.id),
        functools.partial(torch.end_routing, pool.device, pool.id),
        *_steps_of_destruction(pool),
        release,
    ]


def _steps_with_release(torch: TorchCuda, pool: _Retirable) -> list[functools.partial[Any]]:
    """Return the steps that retire a pool and free its memory.

    The caller holds the capture gate. The end of the object holds the GIL, and a free waits for the devices: they are waited
    for before.
    """
    if may_not_free(torch):
        return _steps_of_retirement(torch, pool)
    return [*(functools.partial(torch.synchronize, device) for device in devices_in_use()), *_steps_of_destruction(pool)]


def _steps_of_destruction(pool: _Retirable) -> list[functools.partial[Any]]:
    return [
        functools.partial(ctypes.pythonapi.Py_DecRef, ctypes.c_void_p(id(pool.memory_pool))),  # the leaked reference
        functools.partial(setattr, pool, "memory_pool", None),  # the last one
    ]


def has_idle_segment(segments: list[dict[str, Any]]) -> bool:
    """Return whether retiring a pool with these segments releases memory to the driver."""
    return bool([row for row in segments if not [block for block in row["blocks"] if block["state"] != "inactive"]])
