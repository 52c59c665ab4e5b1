"""Decide at the entry of a region whether to empty PyTorch's cache, so that the region's allocations find free memory.

Memory that PyTorch caches is free for the program and in use for the driver. PyTorch empties its cache when memory runs out,
but not inside a pool, where the allocation fails. So the cache is emptied before: at the first region of a tag, which loads
something; at a later one, if less is free than the most that a region of the tag has taken so far; and if less than half of
the device is free, and less than PyTorch caches. The regions of ``disable()`` count as those of one more tag.

The cache is not emptied again while the tag holds at least as much memory as at an emptying that its region did not need.
Once the program has released all memory of a tag, the records of the tag are deleted.

Owns a record of each tag and device. There is no lock: each change is one operation of a dict, and lost sizes do not matter.
"""

from __future__ import annotations

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.records.pool import Key
from torch_memory_saver.errors import TorchMemorySaverError, rename_operation
from torch_memory_saver.options import RegionOptions

__all__ = ["EntryRoom"]

#: The cache is emptied before a tag's first region if it is larger than this part of the device.
_LARGE_PART = 0.01
#: The key that stands for the regions of disable() in place of a tag. No tag is empty.
_DISABLED = ""


class _Record:
    """The record of the regions of one tag on one device.

    Attributes:
        most: The most bytes that one of the regions has taken.
        needless: Bytes that the tag held when the cache was last emptied because of `most`. None if it never was, or if that
            was needed.
        free: Free bytes of the device before that emptying.
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
        """Decide whether PyTorch's cache is to be emptied before a region with these options is entered. To be called once
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
        """Note the bytes that a region has allocated in pools of that key. To be called when the region ends."""
        options = key.options
        record = self._records.get((options.tag if options.managed else _DISABLED, key.device))
        if record is None:
            return
        record.most = max(record.most, taken)
        if taken > record.free:
            record.needless = None

    def forget_empty_tags(self) -> None:
        """Delete the records of tags that hold no memory. To be called after the program has released cached memory."""
        holding = {row.tag for row in _core.usage(None) if row.bytes}
        for key in list(self._records):
            if key[0] not in holding:
                self._records.pop(key, None)


def _held_bytes(tag: str, device: int) -> int:
    """Return the resident bytes of the tag on the device. disable() holds none."""
    return sum(row.resident_bytes for row in _core.usage(tag) if row.device == device) if tag else 0
