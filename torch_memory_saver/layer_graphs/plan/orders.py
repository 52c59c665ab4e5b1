"""The passes of an order: the chunk of each micro-batch, and its begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["Pass", "passes"]


@dataclass(frozen=True)
class Pass:
    """One micro-batch in one chunk, from its forward to its backward.

    It is *in flight* in between, both included.

    Attributes:
        chunk: The chunk on this rank.
        microbatch: The micro-batch.
        forward: The position of its forward in the order.
        backward: The position of its backward in the order.
    """

    chunk: int
    microbatch: int
    forward: int
    backward: int


def passes(order: Sequence[int]) -> tuple[Pass, ...]:
    """Return the passes of an order, sorted by the positions of their forwards.

    Args:
        order: One rank's order.

    Raises:
        InvalidArgumentError: The order is empty, or has an entry that is no chunk, a backward before its forward, or a
            forward without a backward; or its chunks run different numbers of micro-batches.
    """
    if not order:
        raise InvalidArgumentError("the order is empty")
    forwards: dict[int, list[int]] = {}
    backwards: dict[int, list[int]] = {}
    for position, entry in enumerate(order):
        if type(entry) is not int or entry == 0:
            raise InvalidArgumentError(f"position {position} of the order is {entry!r}: it must be an int and not 0")
        mine, chunk = (forwards, entry - 1) if entry > 0 else (backwards, -entry - 1)
        mine.setdefault(chunk, []).append(position)
        if len(backwards.get(chunk, ())) > len(forwards.get(chunk, ())):
            raise InvalidArgumentError(f"position {position} of the order is a backward of chunk {chunk} before its forward")
    _check_counts(forwards, backwards)
    found = [
        Pass(chunk, microbatch, forward, backward)
        for chunk, positions in forwards.items()
        for microbatch, (forward, backward) in enumerate(zip(positions, backwards[chunk], strict=True))
    ]
    return tuple(sorted(found, key=lambda item: item.forward))


def _check_counts(forwards: dict[int, list[int]], backwards: dict[int, list[int]]) -> None:
    if sorted(forwards) != list(range(len(forwards))):
        raise InvalidArgumentError(f"the order has the chunks {sorted(forwards)}: they must be 0, 1, 2 and so on")
    for chunk, positions in sorted(forwards.items()):
        if len(positions) != len(backwards.get(chunk, ())):
            raise InvalidArgumentError(
                f"the order has {len(positions)} forwards and {len(backwards.get(chunk, ()))} backwards of chunk {chunk}"
            )
        if len(positions) != len(forwards[0]):
            raise InvalidArgumentError(
                f"the order has {len(forwards[0])} forwards of chunk 0 and {len(positions)} of chunk {chunk}"
            )
