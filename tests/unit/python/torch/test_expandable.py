"""Guards how PyTorch's expandable segments are cut into the pieces that are managed one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver._torch.binding.expandable_segments import cut

BASE, PIECE = 1 << 40, 20 << 20

Snapshot = dict[str, Any]


def segment(blocks: list[tuple[int, str]], is_expandable: bool = True) -> Snapshot:
    """A segment with blocks of the given sizes and states."""
    rows, address = [], BASE
    for size, state in blocks:
        rows.append({"address": address, "size": size, "requested_size": size - 8, "state": state})
        address += size
    return {"address": BASE, "total_size": address - BASE, "is_expandable": is_expandable, "blocks": rows, "device": 0}


def row(number: int) -> Any:
    """The managed allocation of one piece."""
    return SimpleNamespace(address=BASE + number * PIECE, reserved_bytes=PIECE)


def test_an_ordinary_segment_stays_whole() -> None:
    given_one = segment([(2 * PIECE, "inactive")], is_expandable=False)
    assert cut([given_one], [row(0), row(1)]) == [given_one]


def test_without_managed_pieces_a_segment_stays_whole() -> None:
    given_one = segment([(2 * PIECE, "inactive")])
    assert cut([given_one], []) == [given_one]


def test_ordinary_pieces_between_managed_ones_stay_together() -> None:
    pieces = cut([segment([(5 * PIECE, "inactive")])], [row(1), row(4)])
    assert [(each["address"] - BASE) // PIECE for each in pieces] == [0, 1, 2, 4]
    assert [each["total_size"] // PIECE for each in pieces] == [1, 1, 2, 1]


def test_a_block_in_several_pieces_is_cut() -> None:
    size = 2 * PIECE + 512
    pieces = cut([segment([(512, "inactive"), (size, "active_allocated"), (PIECE - 1024, "inactive")])], map(row, range(3)))
    assert [[block["size"] for block in each["blocks"]] for each in pieces] == [
        [512, PIECE - 512],
        [PIECE],
        [1024, PIECE - 1024],
    ]
    assert [each["allocated_size"] for each in pieces] == [PIECE - 512, PIECE, 1024]
    assert sum(each["requested_size"] for each in pieces) == 512 - 8 + size - 8 + PIECE - 1024 - 8


STATES = st.sampled_from(["inactive", "active_allocated", "active_pending_free"])
PLACES = st.lists(st.integers(0, 6 * PIECE // 512 - 1), max_size=12, unique=True)


@given(places=PLACES, states=st.lists(STATES, min_size=13, max_size=13), managed=st.sets(st.integers(0, 5)))
def test_every_byte_stays_in_its_state(places: list[int], states: list[str], managed: set[int]) -> None:
    ends = sorted({512 * place for place in places if place} | {6 * PIECE})
    sizes = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    whole = segment(list(zip(sizes, states, strict=False)))
    pieces = cut([whole], [row(number) for number in managed])
    borders = {BASE} | {BASE + (number + after) * PIECE for number in managed for after in (0, 1)} - {BASE + 6 * PIECE}
    assert [each["address"] for each in pieces] == sorted(borders)
    assert sum(each["total_size"] for each in pieces) == whole["total_size"]
    for each in pieces:
        addresses = [block["address"] for block in each["blocks"]]
        assert addresses[0] == each["address"]
        assert sum(block["size"] for block in each["blocks"]) == each["total_size"]
    for key in ("size", "requested_size"):
        for state in set(states):
            before = sum(block[key] for block in whole["blocks"] if block["state"] == state)
            assert before == sum(block[key] for each in pieces for block in each["blocks"] if block["state"] == state)
