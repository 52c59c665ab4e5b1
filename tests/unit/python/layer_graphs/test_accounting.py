"""Guards the arithmetic of memory reports: what is in use at once, what memory tensors cover, and the text of values."""

from __future__ import annotations

import pytest

from torch_memory_saver.layer_graphs.captured.accounting import Ranges, count, covered_bytes, part, peak_bytes, size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "at_end", "peak"),
    [
        ([], 0, 0),
        ([], 7, 7),
        ([4, 12, -4, 12, 1, -12, -12], 1, 25),
        ([4, 12, -4], 112, 116),  # others hold 100
        ([-5, 3], 8, 10),  # what was there before is the most
    ],
)
def test_the_peak_follows_from_the_changes_and_the_end(changes: list[int], at_end: int, peak: int) -> None:
    assert peak_bytes(changes, at_end) == peak


@pytest.mark.parametrize(
    ("ranges", "covered"),
    [
        ([], 0),
        ([(10, 5), (20, 5)], 10),
        ([(20, 5), (10, 5), (10, 5)], 10),
        ([(10, 10), (12, 2), (18, 4)], 12),
        ([(10, 5), (15, 5)], 10),
        ([(10, 0)], 0),
    ],
)
def test_bytes_that_several_ranges_have_count_once(ranges: list[tuple[int, int]], covered: int) -> None:
    assert covered_bytes(ranges) == covered


def test_an_address_lies_in_a_range_up_to_its_end() -> None:
    ranges = Ranges([(100, 10), (200, 1)])
    assert [address in ranges for address in (99, 100, 109, 110, 200, 201)] == [False, True, True, False, True, False]


def test_values_as_text() -> None:
    assert [size(34 * MIB), size(1 << 10), count(3), part(0.25)] == ["34.0 MiB", "0.0010 MiB", "3", "25.0%"]
    assert {size(None), count(None), part(None)} == {"not measured"}
