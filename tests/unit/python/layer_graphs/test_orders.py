"""Guards how an order is read: its passes, and what is no order."""

from __future__ import annotations

import pytest

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan.orders import Pass, passes


def test_a_pass_lasts_from_a_forward_to_the_backward_of_the_same_microbatch() -> None:
    assert passes([1, 2, 1, -2, -1, 2, -2, -1]) == (Pass(0, 0, 0, 4), Pass(1, 0, 1, 3), Pass(0, 1, 2, 7), Pass(1, 1, 5, 6))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], "empty"),
        ([1, 0, -1], "position 1 .* 0"),
        ([1, 1.0, -1, -1], "position 1"),
        ([True, -1], "position 0"),
        ([-1, 1], "position 0 .* before its forward"),
        ([1, -1, -1, 1], "position 2 .* before its forward"),
        ([1, 1, -1], "2 forwards and 1 backwards of chunk 0"),
        ([2, -2], r"chunks \[1\]"),
        ([1, -1, 2, -2, 1, -1], "2 forwards of chunk 0 and 1 of chunk 1"),
    ],
)
def test_what_is_no_order_is_refused(order: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        passes(order)
