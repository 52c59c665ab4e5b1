"""preserve(): keep the contents of blocks in memory whose contents a pause drops.

A tensor is registered by its storage, because the tensor object may be temporary: a view, ``p.data``, ``p.detach()`` and
the values of ``state_dict()`` die at once, while the storage lives on. ``StorageWeakRef`` refers to PyTorch's storage
itself and not to the Python object that stands for it. The key is the address of the storage's record. The reference
keeps that address from being used again, so a new storage never takes over a registration. It does not keep the memory.

Each pause resolves the registrations anew, on the thread of the call, once its devices are idle: to the storages of tensors
that still live, and the storages of the buffers that modules have then. A pause keeps those storages that lie in memory
without a backup; elsewhere everything is kept anyway.

Thousands of storages must not delay a pause. So addresses and sizes are in parallel lists of numbers, which functions of
Python's library process: there is no object and no loop for each storage.

One lock guards the changes of the registrations, and nothing else. Weak references are resolved without it: the last
reference to a storage may be dropped then, which frees memory.
"""

from __future__ import annotations

import logging
import sys
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, compress, repeat
from operator import add, lt
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._engine.tensors.lookup import add_extents, storages_of
from torch_memory_saver._text import binary_size, counted
from torch_memory_saver._torch.base.steps import InterruptSafeLock
from torch_memory_saver._torch.memory.live_blocks import Live
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.reports.usage import PreservedBlock

__all__ = ["PreserveHandle", "Preserved", "PreservedObjects", "preserving_finder"]


class _Module(NamedTuple):
    #: Returns the module, or None once it has died.
    find: Callable[[], Any]
    #: Its parameters as well as its buffers.
    parameters: bool


class _Group:
    """The storages and modules of one tag, by their keys: the address of a storage's record, the id of a module."""

    def __init__(self) -> None:
        #: A StorageWeakRef for each storage.
        self.storages: dict[int, Any] = {}
        self.modules: dict[int, _Module] = {}

    def copy(self) -> _Group:
        copied = _Group()
        copied.storages, copied.modules = self.storages.copy(), self.modules.copy()
        return copied

    def add(self, torch: Any, what: Any, parameters: bool) -> None:
        if isinstance(what, torch.Tensor):
            from torch.multiprocessing.reductions import StorageWeakRef

            for storage in storages_of(torch, [what]):
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = reference
        else:
            self.modules[id(what)] = _Module(weakref.ref(what), parameters)

    def find_storages(self, torch: Any, dead: _Group) -> Iterator[Any]:
        """Yield the storages that the group stands for now, one at a time, so that few live at once. Add what has died to
        `dead` on the way."""
        find = torch.UntypedStorage._new_with_weak_ptr
        for key, reference in self.storages.items():
            storage = find(key)
            if storage is None:
                dead.storages[key] = reference
            else:
                yield storage
        members: list[Any] = []
        for key, each in self.modules.items():
            module = each.find()
            if module is None:
                dead.modules[key] = each
            else:
                _add_members_of(module, each.parameters, members)
        yield from storages_of(torch, [member for member in members if member is not None])

    def update(self, entries: _Group) -> None:
        self.storages.update(entries.storages)
        self.modules.update(entries.modules)

    def remove(self, entries: _Group) -> None:
        """Remove entries that died or whose handle was removed.

        A later entry with the same key stays: it belongs to a later call, or to a new module with the id of a dead one.
        """
        for key, reference in entries.storages.items():
            if self.storages.get(key) is reference:
                self.storages.pop(key, None)  # a finalizer may have removed it
        for key, module in entries.modules.items():
            if self.modules.get(key) is module:
                self.modules.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self.storages or self.modules)


def _add_members_of(module: Any, parameters: bool, members: list[Any]) -> None:
    """Add the buffers of a module and its submodules, and on request the parameters. One that is not set adds None.
    `module.buffers()` would name each of them, which takes longer than everything else that a pause does here."""
    for each in module.modules():
        members.extend(each._buffers.values())
        if parameters:
            members.extend(each._parameters.values())


def _group_of(torch: Any, what: Iterable[Any], parameters: bool) -> _Group:
    group = _Group()
    for each in what:
        group.add(torch, each, parameters)
    return group


class PreservedObjects:
    """The registrations of this process, by tag (None: memory of any tag)."""

    def __init__(self) -> None:
        self._groups: dict[str | None, _Group] = {}
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = InterruptSafeLock()

    def add(self, torch: Any, what: Iterable[Any], tag: str | None, parameters: bool) -> _Group:
        """Register tensors and modules, and return what :meth:`remove` takes.

        Raises:
            InvalidArgumentError: A tensor of a layout whose parts are not known. Nothing was registered.
        """
        added = _group_of(torch, what, parameters)
        self._lock.call(self._groups.setdefault(tag, _Group()).update, added)
        return added

    def remove(self, added: _Group, tag: str | None) -> None:
        """Remove the entries of one call of :meth:`add`."""
        self._lock.call(self._groups[tag].remove, added)

    def find_storages(self, torch: Any) -> Iterator[tuple[str | None, Iterator[Any]]]:
        """Yield each tag with the storages that its registered objects stand for now. Remove objects that have died once
        the storages of their tag were consumed."""
        for tag, group in [(tag, group.copy()) for tag, group in list(self._groups.items())]:
            dead = _Group()
            yield tag, group.find_storages(torch, dead)
            if dead:
                self.remove(dead, tag)

    def __bool__(self) -> bool:
        """Whether anything is registered. Dead objects count until the next :meth:`find_storages`."""
        return any(list(self._groups.values()))  # a copy: other threads may add to it


logger = logging.getLogger("torch_memory_saver")

#: Storages: address -> bytes.
_Storages = dict[int, int]
#: An allocation, and the begins and the ends of the storages that are kept of it.
_Kept = tuple[_core.Segment, list[int], list[int]]


class PreserveHandle:
    """The result of :meth:`TorchMemorySaver.preserve`.

    Attributes:
        blocks: The blocks that a pause would have kept at the time of the call, by address.
    """

    def __init__(self, blocks: tuple[PreservedBlock, ...], remove: Callable[[], None]) -> None:
        self.blocks = blocks
        self._remove = remove
        self._is_removed = False

    def __repr__(self) -> str:
        kept = f"{counted(len(self.blocks), 'block')}, {binary_size(sum(block.bytes for block in self.blocks))}"
        return f"<PreserveHandle: removed: {kept}>" if self._is_removed else f"<PreserveHandle: {kept}, which pauses keep>"

    def remove(self) -> None:
        """End the registration, so that later pauses drop the contents.

        Objects that a later call has registered with the same tag stay preserved. A second call does nothing.
        """
        self._remove()
        self._is_removed = True


class Preserved:
    """The tensors and modules that a process preserves."""

    def __init__(self) -> None:
        self._objects = PreservedObjects()
        self.after_fork_in_child = self._objects.after_fork_in_child

    def add(self, what: Iterable[Any], tag: str | None, parameters: bool) -> PreserveHandle:
        """Register tensors and modules, and log tensors that are not in managed memory. Return the handle.

        Raises:
            InvalidArgumentError: An object is not a tensor or a module. Nothing was registered.
        """
        torch, objects = objects_in("preserve", what)
        added = self._objects.add(torch, objects, tag, parameters)
        storages: _Storages = {}
        found = added.find_storages(torch, _Group())
        add_extents(torch, [storage for storage in found if storage.device.type == "cuda"], storages)
        unmanaged = sum(_core.find(begin) is None for begin in storages)
        if unmanaged:
            logger.warning(
                "preserve: %d of %d tensors are not in managed memory now. No pause drops their contents, so there is "
                "nothing to preserve of them.",
                unmanaged,
                len(storages),
            )
        if not storages:
            logger.warning(
                "preserve: %s, so there is nothing to preserve. A module stands for its buffers, and with parameters=True "
                "also for its parameters.",
                "what was passed has no tensors on a GPU now" if objects else "nothing was passed",
            )
        return PreserveHandle(_blocks({tag: storages}, None), partial(self._objects.remove, added, tag))

    def blocks(self, tag: str | None) -> tuple[PreservedBlock, ...]:
        """Return the blocks that a pause of a tag (None for every tag) would keep now, by address."""
        return _blocks(self._storages(), None if tag is None else (tag,))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered. Dead objects count until the registrations are resolved again."""
        return not self._objects

    def live(self, tags: Tags) -> tuple[bytes, bytes]:
        """Return the core's lists for a pause of the tags: the allocations without a backup of which it keeps contents, and
        the ranges that it keeps of them."""
        allocations, ranges = array("Q"), array("Q")
        for row, begins, ends in _kept_by_allocation(self._storages(), tags):
            allocations.append(row.address)
            begins, ends = _merge_touching(begins, ends)
            pairs = [0] * (2 * len(begins))
            pairs[::2], pairs[1::2] = begins, ends
            ranges.extend(pairs)
        return allocations.tobytes(), ranges.tobytes()

    def _storages(self) -> dict[str | None, _Storages]:
        """Return the storages of all objects that are registered now, by the tag of the registration."""
        if not self._objects:
            return {}
        torch = _imported_torch("preserve")
        by_tag: dict[str | None, _Storages] = {}
        for tag, found in self._objects.find_storages(torch):
            add_extents(torch, found, by_tag.setdefault(tag, {}))
        return by_tag


def _blocks(storages: Mapping[str | None, _Storages], tags: Tags) -> tuple[PreservedBlock, ...]:
    return tuple(
        PreservedBlock(address=begin, bytes=end - begin, device=row.device, tag=row.tag)
        for row, begins, ends in _kept_by_allocation(storages, tags)
        for begin, end in zip(begins, ends, strict=True)
    )


def _kept_by_allocation(by_tag: Mapping[str | None, _Storages], tags: Tags) -> Iterator[_Kept]:
    """Yield, by address, what is kept of the allocations of the tags without a backup. Storages may overlap."""
    rows = [row for row in _core.segments() if row.backup == _core.BACKUP_NONE and selects(tags, row.tag)]
    rows.sort(key=lambda row: row.address)
    storages = _merge_registrations(rows, by_tag)
    _cut_at_borders(rows, storages)
    for row, begins in _by_allocation(rows, sorted(storages)):
        yield row, begins, list(map(add, begins, map(storages.__getitem__, begins)))


def _cut_at_borders(rows: list[_core.Segment], storages: _Storages) -> None:
    """Divide the storages that lie in several allocations, the pieces of an expandable segment, at the borders of these."""
    ends = {row.address: row.address + row.bytes for row in rows}
    starts = list(ends)
    for row, begins in list(_by_allocation(rows, sorted(storages))):
        for begin in begins:
            border, end = ends[row.address], begin + storages[begin]
            if end <= border:
                continue
            storages[begin] = border - begin
            for start in starts[bisect_right(starts, begin) :]:
                if start != border or start >= end:
                    break
                border = ends[start]
                storages[start] = max(storages.get(start, 0), min(end, border) - start)


def _merge_registrations(rows: list[_core.Segment], by_tag: Mapping[str | None, _Storages]) -> _Storages:
    """Merge the storages of all registrations. A registration with a tag adds only storages in memory of that tag."""
    merged = by_tag.get(None, {}).copy()
    for tag, storages in by_tag.items():
        if tag is None:
            continue
        for row, begins in _by_allocation(rows, sorted(storages)):
            if row.tag == tag:
                larger = map(max, map(storages.__getitem__, begins), map(merged.get, begins, repeat(0)))
                merged.update(zip(begins, larger, strict=True))
    return merged


def _by_allocation(rows: list[_core.Segment], addresses: list[int]) -> Iterator[tuple[_core.Segment, list[int]]]:
    """Yield the allocations that contain addresses, each with these addresses. Both arguments are sorted by address."""
    starts = [row.address for row in rows]
    position = 0
    while position < len(addresses):
        after = bisect_right(starts, addresses[position])
        row = rows[after - 1] if after else None
        if row is not None and addresses[position] < row.address + row.bytes:
            end = bisect_left(addresses, row.address + row.bytes, position)
            yield row, addresses[position:end]
        else:  # outside of all allocations, as everything up to the next one
            end = bisect_left(addresses, starts[after], position) if after < len(starts) else len(addresses)
        position = end


def _merge_touching(begins: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
    """Merge ranges that overlap or touch, because each costs the driver a copy. They are sorted by begin, and not empty."""
    reached = list(accumulate(ends, max))
    is_apart = list(map(lt, reached, begins[1:]))
    return [begins[0], *compress(begins[1:], is_apart)], [*compress(reached, is_apart), reached[-1]]


def preserving_finder(
    find_live: Callable[[], Live | None] | None, preserved: Preserved, tags: Tags
) -> Callable[[], Live | None]:
    """Return a function that adds the preserved bytes to the live bytes of a pause of `tags`, in memory with a backup."""

    def find() -> Live | None:
        kept = preserved.live(tags)
        live = None if find_live is None else find_live()
        if live is None or not live[0]:
            return kept
        return _sorted_addresses(live[0] + kept[0]), *_sorted_ranges(_rows(*live[1:]) + _rows(kept[1]))

    return find


def _sorted_addresses(addresses: bytes) -> bytes:
    return array("Q", sorted(array("Q", addresses))).tobytes()


def _rows(ranges: bytes, used: bytes | None = None) -> list[tuple[int, int, int]]:
    """Return the begin and the end of each range, and the end of its used part: the end of the range if that is unknown."""
    numbers = array("Q", ranges)
    begins, ends = numbers[::2], numbers[1::2]
    return list(zip(begins, ends, ends if used is None else array("Q", used), strict=True))


def _sorted_ranges(rows: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
    """Return the ranges in order, and the ends of their used parts. The ranges do not overlap, because those of live blocks
    and those of preserved storages lie in different memory."""
    ordered = sorted(rows)
    ranges = array("Q", [number for begin, end, _ in ordered for number in (begin, end)])
    return ranges.tobytes(), array("Q", [used for _, _, used in ordered]).tobytes()


def _imported_torch(operation: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise InvalidArgumentError(f"{operation}() needs tensors or modules, but torch is not imported")
    return torch


def objects_in(operation: str, what: Iterable[Any]) -> tuple[Any, list[Any]]:
    """Return the module torch, and the tensors and modules among `what` and in its iterables.

    Raises:
        InvalidArgumentError: An object is not a tensor or a module.
    """
    torch = _imported_torch(operation)
    return torch, list(_flat(torch, operation, what))


def _flat(torch: Any, operation: str, what: Iterable[Any]) -> Iterator[Any]:
    """Return the tensors and modules among `what` and in its iterables."""
    for each in what:
        if isinstance(each, (torch.Tensor, torch.nn.Module)):
            yield each
        elif isinstance(each, Iterable) and not isinstance(each, (str, bytes)):
            yield from _flat(torch, operation, each)
        else:
            raise InvalidArgumentError(
                f"{operation}() needs tensors, modules or iterables of them, not {type(each).__name__}"
                + (": pass a name as tag=, and of a dict its values()" if isinstance(each, str) else "")
            )
