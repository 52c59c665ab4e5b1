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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._saver.tensor_parts import extents_of
from torch_memory_saver._torch.live import Live
from torch_memory_saver._torch.pools import Tags, selects
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.usage import PreservedBlock

__all__ = ["Preserved", "preserving_finder"]

logger = logging.getLogger("torch_memory_saver")

#: The address and the bytes of a storage.
_Extent = tuple[int, int]


class _Registration(NamedTuple):
    #: Returns the tensor or module, or None once it has died.
    target: Callable[[], Any]
    #: Only memory of this tag; None: of any.
    tag: str | None
    #: Parameters of a module as well.
    parameters: bool

    def tensors(self, torch: Any) -> Iterable[Any]:
        """Those that it stands for now."""
        target = self.target()
        if target is None:
            return ()
        if isinstance(target, torch.Tensor):
            return (target,)
        return [*target.buffers(), *target.parameters()] if self.parameters else target.buffers()


#: A storage in managed memory: its begin, its end, and the allocation that it lies in.
_Range = tuple[int, int, _core.Segment]


class Preserved:
    """The registrations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the id of the object and the tag.
        self._registrations: dict[tuple[int, str | None], _Registration] = {}

    def add(self, what: Iterable[Any], tag: str | None, parameters: bool) -> tuple[PreservedBlock, ...]:
        """Registers tensors and modules. Returns what a pause would keep of them now, and logs what is not managed.

        Raises:
            InvalidArgumentError: Something else is among them. Nothing was registered.
        """
        torch = _imported_torch("preserve")
        added = {(id(each), tag): _register(torch, each, tag, parameters) for each in _flat(torch, "preserve", what)}
        with self._lock:
            self._registrations.update(added)
        tensors = [tensor for each in added.values() for tensor in each.tensors(torch)]
        storages = {begin for begin, _ in extents_of(torch, tensors)}
        unmanaged = sum(_core.find(begin) is None for begin in storages)
        if unmanaged:
            logger.warning(
                "preserve: %d of %d tensors are not in managed memory now. No pause drops their contents, so there is "
                "nothing to preserve of them.",
                unmanaged,
                len(storages),
            )
        return self._blocks(list(added.values()), None)

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
        return self._blocks(self._alive(), None if tag is None else (tag,))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered. What has died counts until it is next looked at."""
        return not self._registrations

    def live(self, tags: Tags) -> Live:
        """The core's list of the memory of the tags without a backup that a pause keeps, and of the ranges kept of it."""
        allocations, ends = array("Q"), array("Q")
        for begin, end, row in self._ranges(self._alive(), tags):
            if not allocations or allocations[-1] != row.address:
                allocations.append(row.address)
            if ends and begin < ends[-1]:  # storages may overlap
                ends[-1] = max(ends[-1], end)
            else:
                ends.extend((begin, end))
        return allocations.tobytes(), ends.tobytes()

    def _alive(self) -> list[_Registration]:
        with self._lock:
            dead = [key for key, each in self._registrations.items() if each.target() is None]
            for key in dead:
                del self._registrations[key]
            return list(self._registrations.values())

    def _blocks(self, registrations: list[_Registration], tags: Tags) -> tuple[PreservedBlock, ...]:
        return tuple(
            PreservedBlock(address=begin, bytes=end - begin, device=row.device, tag=row.tag)
            for begin, end, row in self._ranges(registrations, tags)
        )

    def _ranges(self, registrations: list[_Registration], tags: Tags) -> list[_Range]:
        """The storages in memory of the tags without a backup, each once, by address."""
        if not registrations:
            return []
        torch = _imported_torch("preserve")
        rows = sorted(
            (row for row in _core.segments() if row.backup == _core.BACKUP_NONE and selects(tags, row.tag)),
            key=lambda row: row.address,
        )
        tensors: dict[str | None, list[Any]] = {}
        for registration in registrations:
            tensors.setdefault(registration.tag, []).extend(registration.tensors(torch))
        found = [
            each for tag, those in tensors.items() for each in _inside(rows, sorted(set(extents_of(torch, those))), tag)
        ]
        if len(tensors) > 1:
            found = [*{each[:2]: each for each in sorted(found, key=lambda each: each[:2])}.values()]
        return found


def _inside(rows: list[_core.Segment], extents: list[_Extent], tag: str | None) -> Iterator[_Range]:
    """The extents that begin in one of the rows, and in memory of the tag (None: of any). Both are sorted by address."""
    remaining = iter(rows)
    row = next(remaining, None)
    for begin, size in extents:
        while row is not None and row.address + row.bytes <= begin:
            row = next(remaining, None)
        if row is None:
            return
        if row.address <= begin and tag in (None, row.tag):
            yield begin, begin + size, row


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
        extents_of(torch, (what,))  # raises for a tensor without storages
        from torch.utils.weak import TensorWeakRef

        return _Registration(TensorWeakRef(what), tag, parameters)
    return _Registration(weakref.ref(what), tag, parameters)
