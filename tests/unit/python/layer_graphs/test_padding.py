"""Guards the price of padding: which size serves a length, and which part of the work is padding."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan import padding_cost, smallest_size

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lengths=LENGTHS, sizes=SIZES, power=st.integers(0, 3))
def test_each_length_is_padded_to_the_least_that_it_fits_into(lengths: list[int], sizes: list[int], power: int) -> None:
    sizes = [*sizes, 40]
    chosen = [min(size for size in sizes if size >= length) for length in lengths]
    cost = padding_cost(lengths, sizes, work=lambda n: n**power)
    assert [smallest_size(length, sizes) for length in lengths] == chosen
    assert list(cost.served) == sorted(set(sizes))
    for size, served in cost.served.items():
        assert served == tuple(length for length, other in zip(lengths, chosen, strict=True) if other == size)
    useful, done = sum(n**power for n in lengths), sum(n**power for n in chosen)
    assert cost.padded_fraction == pytest.approx(float(Fraction(done - useful, done)), abs=1e-12)
    assert 0 <= cost.padded_fraction < 1
    assert cost.graphs == len(set(chosen)) and cost.unused == tuple(sorted(set(sizes) - set(chosen)))


@given(lengths=LENGTHS, sizes=SIZES, more=st.integers(1, 40))
def test_one_size_more_never_costs_more(lengths: list[int], sizes: list[int], more: int) -> None:
    sizes = [*sizes, 40]
    assert padding_cost(lengths, [*sizes, more]).padded_fraction <= padding_cost(lengths, sizes).padded_fraction


def test_work_is_the_length_by_default() -> None:
    assert padding_cost([1, 2, 3], [4]).padded_fraction == 0.5
    assert padding_cost([2], [4], work=lambda n: n * n).padded_fraction == 0.75
    assert padding_cost(iter([4, 4]), iter([4])).padded_fraction == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smallest_size(5, [4, 2]), "length 5 is longer than the largest captured size, 4: capture a larger one"),
        (lambda: smallest_size(5, []), "no sizes"),
        (lambda: smallest_size(0, [4]), "length 0 must be an int of 1 or more"),
        (lambda: smallest_size(True, [4]), "length True must be"),
        (lambda: padding_cost([], [4]), "no lengths"),
        (lambda: padding_cost([1], []), "no sizes"),
        (lambda: padding_cost([1.5], [4]), r"length 1\.5 must be an int"),  # type: ignore[list-item]
        (lambda: padding_cost([1], [4, -1]), "size -1 must be an int"),
        (lambda: padding_cost([1, 9], [4]), "length 9 is longer"),
        (lambda: padding_cost([1], [4], work=lambda n: -n), r"work\(1\) is -1 and work\(4\) is -4: work must be positive"),
        (lambda: padding_cost([1], [4], work=lambda n: 1 / n), r"work\(4\) is 0\.25.* must not fall"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()
