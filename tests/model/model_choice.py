"""The source of the operations' decisions: a seeded generator in the long runs, hypothesis in the tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class RandomChoice:
    """Decisions of a generator with a seed: the same seed decides the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def pick(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def weighted(self, values: Sequence[T], weights: Sequence[int]) -> T:
        return self._random.choices(values, weights)[0]


class DrawnChoice:
    """Decisions that hypothesis draws, and shrinks when one of them reveals a bug."""

    def __init__(self, data: Any) -> None:
        from hypothesis import strategies

        self._data, self._strategies = data, strategies

    def integer(self, least: int, most: int) -> int:
        return int(self._data.draw(self._strategies.integers(least, most)))

    def pick(self, values: Sequence[T]) -> T:
        return values[self.integer(0, len(values) - 1)]
