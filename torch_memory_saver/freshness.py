"""What check_fresh() has found: memory that nothing has written to since a resume brought it back without contents.

Plain frozen values. Imports neither torch nor the native core.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_memory_saver.memory.model import CallStack

__all__ = ["FreshReport", "UnwrittenBlock"]


@dataclass(frozen=True)
class UnwrittenBlock:
    """Memory that holds the fill pattern of guard mode: a block of PyTorch's allocator, a tensor that is a part of one, or
    an allocation that PyTorch does not know.

    Attributes:
        address: Of the first byte, on the device.
        bytes: Its size, as the program requested it.
        sampled_bytes: The bytes of it that were looked at.
        unwritten_bytes: The bytes of these that lie in parts which hold the pattern from end to end.
        device: CUDA ordinal.
        tag: Of the memory that it lies in.
        dtype: The type of the largest tensor there, such as "float32"; "" if none was found.
        shape: The shape of that tensor; () if none was found.
        names: The parameters and buffers that lie there, such as "Engine.layers.0.rope.cos", in order.
        stack: Where it was allocated, if PyTorch has recorded that; else None.
    """

    address: int
    bytes: int
    sampled_bytes: int
    unwritten_bytes: int
    device: int
    tag: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    stack: CallStack | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as dicts, lists, texts and numbers, for JSON."""
        from torch_memory_saver.memory.comparison.plain import stack_as_dict

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stack = None if self.stack is None else stack_as_dict(self.stack)
        return fields | {"shape": list(self.shape), "names": list(self.names), "stack": stack}


@dataclass(frozen=True)
class FreshReport:
    """The live memory of the tags of a check, each byte of it in one class. All sizes are bytes, as programs request them.

    `unwritten` has the findings, the largest first. `integers`, `partly_written` and `ignored` are no findings, and neither
    are the pools of graphs.

    Attributes:
        unwritten: Blocks that were live when the resume began, and in which everything that was looked at holds the pattern.
        integers: Blocks of an integer type that hold it in all that was looked at, or in parts. Nothing has
            restored them, or they were written with -1 (255 for uint8).
        partly_written: Other blocks that hold it in parts: a cache that fills up, or a restoration that ended too early.
        ignored: What `ignore` names, and holds it in all that was looked at: a cache that was not written yet.
        checked_bytes: Of the blocks that were looked at, findings or not. Without those of `ignored`, and of graphs.
        checked_blocks: Their number.
        ignored_bytes: Of what `ignore` names.
        new_bytes: Of blocks that were allocated after the resume had begun: what they hold is no leftover of the pause.
        restored_bytes: Of memory that the resume has restored from a backup.
        zeroed_bytes: Of memory that was resumed with ``zero=True``.
        never_paused_bytes: Of memory that was not paused since it was allocated.
        unguarded_bytes: Of memory that was resumed while guard mode was off: whether it was written cannot be told.
        graph_bytes: Of the pools of CUDA graphs, free blocks included: PyTorch does not know which are live. A replay writes
            to what its kernels read.
        graph_unwritten_bytes: The part of them in which everything that was looked at holds the pattern.
        sampled_bytes: What was copied to the host, of all that was looked at.
        whole: Whether blocks were read from end to end.
        hidden_objects: Objects of this process that were not searched for tensors and their names, because ``gc.freeze()``
            has put them aside.
    """

    unwritten: tuple[UnwrittenBlock, ...] = ()
    integers: tuple[UnwrittenBlock, ...] = ()
    partly_written: tuple[UnwrittenBlock, ...] = ()
    ignored: tuple[UnwrittenBlock, ...] = ()
    checked_bytes: int = 0
    checked_blocks: int = 0
    ignored_bytes: int = 0
    new_bytes: int = 0
    restored_bytes: int = 0
    zeroed_bytes: int = 0
    never_paused_bytes: int = 0
    unguarded_bytes: int = 0
    graph_bytes: int = 0
    graph_unwritten_bytes: int = 0
    sampled_bytes: int = 0
    whole: bool = False
    hidden_objects: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was found."""
        return not self.unwritten

    @property
    def unwritten_bytes(self) -> int:
        """The bytes of the findings."""
        return sum(block.bytes for block in self.unwritten)

    @property
    def by_stack(self) -> tuple[tuple[CallStack | None, tuple[UnwrittenBlock, ...]], ...]:
        """The findings by where they were allocated, those with the most bytes first; None: that was not recorded."""
        groups: dict[CallStack | None, list[UnwrittenBlock]] = {}
        for block in self.unwritten:
            groups.setdefault(block.stack, []).append(block)
        by_size = sorted(groups.items(), key=lambda item: -sum(block.bytes for block in item[1]))
        return tuple((stack, tuple(blocks)) for stack, blocks in by_size)

    def __str__(self) -> str:
        from torch_memory_saver._saver.freshness_table import render

        return render(self)

    def as_dict(self) -> dict[str, Any]:
        """The fields as dicts, lists, texts and numbers, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = ("unwritten", "integers", "partly_written", "ignored")
        return fields | {name: [block.as_dict() for block in fields[name]] for name in lists}
