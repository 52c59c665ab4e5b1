"""Room for what a region is about to allocate: whether PyTorch's cache is to be given back when a region is entered.

Memory that PyTorch caches is free for the program and in use for the driver. PyTorch gives its cache back when memory runs
out, but not inside a pool, where the allocation fails. So it is given back before: at the first region of a tag, which loads
something; at a later one, if less is free than the most that a region of the tag has taken so far; and if less than half of
the device is free, and less than PyTorch caches. The regions of ``disable()`` count as those of one more tag.

A return that a region did not need is not repeated while the tag holds as much as then: the tag's memory of that size is
there already. A tag whose memory the program has returned begins anew.

Owns a record of each tag and device. No lock: each change is one operation of a dict, and lost sizes do not matter.
"""

from __future__ import annotations

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.records.pool import Key
from torch_memory_saver.errors import TorchMemorySaverError, rename_operation
from torch_memory_saver.options import RegionOptions

__all__ = ["EntryRoom"]

#: The part of a device from which on a cache is worth returning before a tag's first region.
_LARGE_PART = 0.01
#: Key of the regions of disable(), in place of a tag. No tag is empty.
_DISABLED = ""


class _Record:
    """The record of the regions of one tag on one device.

    Attributes:
        most: The most bytes that one of the regions has taken.
        needless: Bytes that the tag held when the cache was last returned because of `most`. None if there was no such
            return, or if it was needed.
        free: Free bytes of the device before that return.
    """

    __slots__ = ("free", "most", "needless")

    def __init__(self) -> None:
        self.most = 0
        self.needless: int | None = None
        self.free = 0


class EntryRoom:
    """The records of this process."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], _Record] = {}

    def is_needed(self, torch: TorchCuda, options: RegionOptions, device: int) -> bool:
        """Decide whether PyTorch's cache is to be returned before a region with these options is entered. To be called once
        for each entry and device in use."""
        try:
            free, total = _core.device_memory(device)
        except TorchMemorySaverError as error:
            rename_operation(error, "region" if options.managed else "disable")
            raise
        key = (options.tag if options.managed else _DISABLED, device)
        record = self._records.get(key)
        if record is None:
            self._records[key] = _Record()
            return torch.releasable_bytes(device) > _LARGE_PART * total
        needs_most = free < record.most and (record.needless is None or _held_bytes(*key) < record.needless)
        if not needs_most and 2 * free >= total:
            return False
        cached = torch.releasable_bytes(device)
        if cached and needs_most:
            record.needless, record.free = _held_bytes(*key), free
            return True
        return free < cached

    def note(self, key: Key, taken: int) -> None:
        """Note the bytes that a region has taken of a device in pools of that key. To be called when the region ends."""
        options = key.options
        record = self._records.get((options.tag if options.managed else _DISABLED, key.device))
        if record is None:
            return
        record.most = max(record.most, taken)
        if taken > record.free:
            record.needless = None

    def forget_empty_tags(self) -> None:
        """Forget the records of tags that hold no memory. To be called after the program has returned cached memory."""
        holding = {row.tag for row in _core.usage(None) if row.bytes}
        for key in list(self._records):
            if key[0] not in holding:
                self._records.pop(key, None)


def _held_bytes(tag: str, device: int) -> int:
    """Return the resident bytes of the tag on the device. disable() holds none."""
    return sum(row.resident_bytes for row in _core.usage(tag) if row.device == device) if tag else 0
