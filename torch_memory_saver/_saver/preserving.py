"""preserve(): blocks that keep their contents in memory whose contents a pause drops.

What is registered is held weakly, and is looked at anew in each pause, on the thread of the call, once its devices are idle:
of a tensor its storage, of a module the storages of the buffers that it has then. A pause keeps those storages that lie in
memory without a backup; elsewhere everything is kept anyway.

The lock guards the list of registrations only. Nothing of torch is called with it held.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import add, ge
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._saver.tensor_parts import add_storages
from torch_memory_saver._torch.live import Live
from torch_memory_saver._torch.pools import Tags, selects
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.usage import PreservedBlock

__all__ = ["Preserved", "preserving_finder"]

logger = logging.getLogger("torch_memory_saver")

#: Storages: address -> bytes.
_Storages = dict[int, int]
#: The id of the registered object, and the tag.
_Key = tuple[int, str | None]
#: By the tag of their registrations.
_TensorsByTag = dict[str | None, list[Any]]


class _Registration(NamedTuple):
    #: Returns the tensor or module, or None once it has died.
    target: Callable[[], Any]
    #: Only memory of this tag; None: of any.
    tag: str | None
    #: Parameters of a module as well.
    parameters: bool


def _tensors_of(module: Any, parameters: bool) -> Iterator[Any]:
    """The buffers of a module and its submodules, and on request the parameters. `module.buffers()` names each of them,
    which takes longer than everything else that a pause does here."""
    for each in module.modules():
        yield from (buffer for buffer in each._buffers.values() if buffer is not None)
        if parameters:
            yield from (parameter for parameter in each._parameters.values() if parameter is not None)


class Preserved:
    """The registrations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registrations: dict[_Key, _Registration] = {}

    def add(self, what: Iterable[Any], tag: str | None, parameters: bool) -> tuple[PreservedBlock, ...]:
        """Registers tensors and modules. Returns what a pause would keep of them now, and logs what is not managed.

        Raises:
            InvalidArgumentError: Something else is among them. Nothing was registered.
        """
        torch = _imported_torch("preserve")
        added = {(id(each), tag): _register(torch, each, tag, parameters) for each in _flat(torch, "preserve", what)}
        with self._lock:
            self._registrations.update(added)
        tensors, _ = _tensors_by_tag(torch, added)
        storages: _Storages = {}
        add_storages(torch, chain(*tensors.values()), storages)
        unmanaged = sum(_core.find(begin) is None for begin in storages)
        if unmanaged:
            logger.warning(
                "preserve: %d of %d tensors are not in managed memory now. No pause drops their contents, so there is "
                "nothing to preserve of them.",
                unmanaged,
                len(storages),
            )
        return _blocks(torch, tensors, None)

    def remove(self, what: Iterable[Any]) -> None:
        """Removes the registrations of tensors and modules, with every tag. Those without one are ignored.

        Raises:
            InvalidArgumentError: Something else is among them.
        """
        removed = {id(each) for each in _flat(_imported_torch("forget"), "forget", what)}
        with self._lock:
            self._registrations = {key: each for key, each in self._registrations.items() if key[0] not in removed}

    def blocks(self, tag: str | None) -> tuple[PreservedBlock, ...]:
        """What a pause of a tag (None: of all) would keep now, by address."""
        if not self._registrations:
            return ()
        torch = _imported_torch("preserved")
        return _blocks(torch, self._tensors(torch), None if tag is None else (tag,))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered. What has died counts until it is next looked at."""
        return not self._registrations

    def live(self, tags: Tags) -> Live:
        """The core's list of the memory of the tags without a backup that a pause keeps, and of the ranges kept of it."""
        allocations, ranges = array("Q"), array("Q")
        if not self._registrations:
            return b"", b""
        torch = _imported_torch("preserve")
        for row, begins, ends in _kept(torch, self._tensors(torch), tags):
            allocations.append(row.address)
            if any(map(ge, ends, begins[1:])):
                begins, ends = _joined(begins, ends)
            pairs = [0] * (2 * len(begins))
            pairs[::2], pairs[1::2] = begins, ends
            ranges.extend(pairs)
        return allocations.tobytes(), ranges.tobytes()

    def _tensors(self, torch: Any) -> _TensorsByTag:
        """Those that are registered, and alive. Forgets what has died."""
        with self._lock:
            registrations = self._registrations.copy()
        tensors, dead = _tensors_by_tag(torch, registrations)
        with self._lock:
            for key in dead:
                if self._registrations.get(key) is registrations[key]:  # no new object with this id was registered
                    del self._registrations[key]
        return tensors


def _tensors_by_tag(torch: Any, registrations: Mapping[_Key, _Registration]) -> tuple[_TensorsByTag, list[_Key]]:
    """The tensors of registrations, and those registrations whose object has died."""
    tensors: _TensorsByTag = {}
    dead = []
    for key, registration in registrations.items():
        target = registration.target()
        if target is None:
            dead.append(key)
            continue
        found = tensors.setdefault(registration.tag, [])
        if isinstance(target, torch.Tensor):
            found.append(target)
        else:
            found.extend(_tensors_of(target, registration.parameters))
    return tensors, dead


def _blocks(torch: Any, tensors: _TensorsByTag, tags: Tags) -> tuple[PreservedBlock, ...]:
    return tuple(
        PreservedBlock(address=begin, bytes=end - begin, device=row.device, tag=row.tag)
        for row, begins, ends in _kept(torch, tensors, tags)
        for begin, end in zip(begins, ends, strict=True)
    )


def _kept(torch: Any, tensors: _TensorsByTag, tags: Tags) -> Iterator[tuple[_core.Segment, list[int], list[int]]]:
    """By address: the allocations of the tags without a backup, and where the storages begin and end that are kept of each.
    Storages may overlap."""
    rows = [row for row in _core.segments() if row.backup == _core.BACKUP_NONE and selects(tags, row.tag)]
    rows.sort(key=lambda row: row.address)
    kept: _Storages = {}
    for tag, those in tensors.items():
        storages: _Storages = {}
        add_storages(torch, those, storages)
        for row, begins in _by_allocation(rows, sorted(storages)):
            if tag in (None, row.tag):
                sizes = map(max, map(storages.__getitem__, begins), map(kept.get, begins, repeat(0)))
                kept.update(zip(begins, sizes, strict=True))
    for row, begins in _by_allocation(rows, sorted(kept)):
        yield row, begins, list(map(add, begins, map(kept.__getitem__, begins)))


def _by_allocation(rows: list[_core.Segment], addresses: list[int]) -> Iterator[tuple[_core.Segment, list[int]]]:
    """The allocations that addresses lie in, each with these addresses. Both arguments are sorted by address."""
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


def _joined(begins: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
    """Ranges that overlap or touch become one: each costs the driver a copy. Sorted by their begins."""
    joined_begins, joined_ends = begins[:1], ends[:1]
    for begin, end in zip(begins, ends, strict=True):
        if begin <= joined_ends[-1]:
            joined_ends[-1] = max(end, joined_ends[-1])
        else:
            joined_begins.append(begin)
            joined_ends.append(end)
    return joined_begins, joined_ends


def preserving_finder(
    find_live: Callable[[], Live | None] | None, preserved: Preserved, tags: Tags
) -> Callable[[], Live | None]:
    """Adds what is preserved to the live bytes of a pause of `tags`, which concern memory with a backup."""

    def find() -> Live | None:
        kept = preserved.live(tags)
        live = None if find_live is None else find_live()
        if live is None or not live[0]:
            return kept
        return _sorted_addresses(live[0] + kept[0]), _sorted_ranges(live[1] + kept[1])

    return find


def _sorted_addresses(addresses: bytes) -> bytes:
    return array("Q", sorted(array("Q", addresses))).tobytes()


def _sorted_ranges(ranges: bytes) -> bytes:
    """No range of the one kind overlaps one of the other: they lie in other memory."""
    ends = array("Q", ranges)
    pairs = sorted(zip(ends[::2], ends[1::2], strict=True))
    return array("Q", [end for pair in pairs for end in pair]).tobytes()


def _imported_torch(operation: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise InvalidArgumentError(f"{operation}() needs tensors or modules, but torch is not imported")
    return torch


def _flat(torch: Any, operation: str, what: Iterable[Any]) -> Iterator[Any]:
    """The tensors and modules among `what` and in its iterables."""
    for each in what:
        if isinstance(each, (torch.Tensor, torch.nn.Module)):
            yield each
        elif isinstance(each, Iterable) and not isinstance(each, (str, bytes)):
            yield from _flat(torch, operation, each)
        else:
            raise InvalidArgumentError(
                f"{operation}() needs tensors, modules or iterables of them, not {type(each).__name__}"
                + (": of a dict pass its values()" if isinstance(each, str) else "")
            )


def _register(torch: Any, what: Any, tag: str | None, parameters: bool) -> _Registration:
    if isinstance(what, torch.Tensor):
        add_storages(torch, (what,), {})  # raises for a tensor without storages
        from torch.utils.weak import TensorWeakRef

        return _Registration(TensorWeakRef(what), tag, parameters)
    return _Registration(weakref.ref(what), tag, parameters)
