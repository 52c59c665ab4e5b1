"""The cost of padding: a graph has one size, so a shorter batch is padded to the next captured size.

This module is plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["PaddingCost", "padding_cost", "smallest_size"]


@dataclass(frozen=True)
class PaddingCost:
    """The cost of padding batches to captured sizes.

    Attributes:
        served: For each size, in ascending order, the lengths that are padded to it, in the order in which they were given.
        padded_fraction: The share of all work that is done on padding: 0 without padding, and always below 1.
    """

    served: Mapping[int, tuple[int, ...]]
    padded_fraction: float

    @property
    def graphs(self) -> int:
        """The number of graphs that are needed: one for each size that serves a length."""
        return sum(1 for lengths in self.served.values() if lengths)

    @property
    def unused(self) -> tuple[int, ...]:
        """The sizes that serve no length, and need no graph."""
        return tuple(size for size, lengths in self.served.items() if not lengths)


def smallest_size(length: int, sizes: Iterable[int]) -> int:
    """Return the smallest captured size that a length fits into.

    Args:
        length: The length of a batch, for instance its tokens.
        sizes: The captured sizes, in any order.

    Raises:
        InvalidArgumentError: No size is large enough, or a number is no positive int.
    """
    return _smallest(_positive("length", length), _checked_sizes(sizes))


def padding_cost(lengths: Iterable[int], sizes: Iterable[int], work: Callable[[int], float] | None = None) -> PaddingCost:
    """Return which captured sizes serve which lengths, and what that costs.

    Args:
        lengths: The length of each batch of a typical run. Equal lengths count as often as they occur.
        sizes: The captured sizes, in any order.
        work: The cost of a batch of a given length, in any unit. None means its length. For attention, which grows with the
            square, pass for instance ``lambda n: n * n``.

    Raises:
        InvalidArgumentError: There is no length, or no size; a length is longer than all sizes; a number is no positive int;
            or the work is not positive, or is less for a size than for a length that is padded to it.
    """
    given = [_positive("length", length) for length in lengths]
    if not given:
        raise InvalidArgumentError("there are no lengths: pass those of a typical run")
    known = _checked_sizes(sizes)
    served: dict[int, list[int]] = {size: [] for size in known}
    useful = done = 0.0
    for length in given:
        size = _smallest(length, known)
        served[size].append(length)
        needed, spent = (length, size) if work is None else (work(length), work(size))
        if not 0 < needed <= spent:
            raise InvalidArgumentError(
                f"work({length}) is {needed} and work({size}) is {spent}: work must be positive, and must not fall with the "
                "length"
            )
        useful += needed
        done += spent
    return PaddingCost({size: tuple(each) for size, each in served.items()}, 1 - useful / done)


def _smallest(length: int, sizes: list[int]) -> int:
    for size in sizes:
        if length <= size:
            return size
    raise InvalidArgumentError(
        f"length {length} is longer than the largest captured size, {sizes[-1]}: capture a larger one, or split the batch"
    )


def _checked_sizes(sizes: Iterable[int]) -> list[int]:
    """Return the sizes in ascending order, each once."""
    found = sorted({_positive("size", size) for size in sizes})
    if not found:
        raise InvalidArgumentError("there are no sizes: pass those that are captured")
    return found


def _positive(what: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{what} {value!r} must be an int of 1 or more")
    return value
