"""Guards the record of the blocks that were live when a resume began, and which blocks managed memory has."""

from __future__ import annotations

from typing import Any

from fake_torch import FakeGraph, FakeTorch

from torch_memory_saver import _core
from torch_memory_saver._torch.live import ManagedBlock, ResumedBlocks, managed_blocks
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
LIVE, FREE, PENDING = "active_allocated", "inactive", "active_awaiting_free"


def allocate(saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str = "w", size: int = 2 * MIB) -> int:
    with saver.region(tag):
        return fake_torch.allocate(size)


def blocks(torch: Any, store: PoolStore, resumed: ResumedBlocks) -> list[ManagedBlock]:
    return managed_blocks(torch, store, resumed, _core.segments())


def test_the_record_is_of_segments_that_are_about_to_be_resumed(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    first, second = allocate(saver, fake_torch, "a"), allocate(saver, fake_torch, "b")
    fake_torch.split(first, (MIB, LIVE), (512, FREE), (512, PENDING), (MIB - 1024, LIVE))
    resumed = ResumedBlocks()
    segments = {row["address"]: row for row in fake_torch.segments()}
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None, "it is active"
    saver.pause("a")
    resumed.note(fake_torch, ("b",))  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None
    resumed.note(None, None)
    assert resumed.live_in(segments[first]) is None
    resumed.note(fake_torch, ("a",))  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) == {(first, MIB), (first + MIB + 1024, MIB - 1024)}
    assert resumed.live_in(segments[second]) is None
    assert resumed.live_in(segments[first] | {"total_size": 4 * MIB}) is None, "another segment has its address"
    saver.resume()
    saver.pause("b")
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is not None, "its own resume is still the last"
    fake_torch.split(first)
    fake_torch.free(first)
    saver.empty_cache()
    resumed.note(fake_torch, None)  # type: ignore[arg-type]
    assert resumed.live_in(segments[first]) is None, "it is gone"
    saver.resume()
    resumed.after_fork_in_child()
    assert resumed.live_in(segments[second]) is None


def test_an_allocation_that_is_not_torchs_is_one_block(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    """One of another library, and one whose address torch lists with another size: an older segment was there."""
    first = allocate(saver, fake_torch)
    other = _core.allocate(3 * MIB, 0)
    fake_torch.split(first, (MIB, LIVE), (MIB, FREE))
    resumed = ResumedBlocks()
    found = blocks(fake_torch, store, resumed)
    assert {(block.address, block.bytes) for block in found} == {(first, MIB), (other, 3 * MIB)}
    assert [(block.address, block.bytes) for block in blocks(None, store, resumed)] == sorted(
        [(first, 2 * MIB), (other, 3 * MIB)]
    )
    fake_torch.rows[0].size = 8 * MIB
    assert {(block.address, block.bytes) for block in blocks(fake_torch, store, resumed)} == {
        (first, 2 * MIB),
        (other, 3 * MIB),
    }
    fake_torch.rows[0].size = 2 * MIB
    _core.free(other)


def test_all_blocks_of_a_pool_that_a_capture_has_used(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    with saver.cuda_graph(FakeGraph(), tag="graph"):  # type: ignore[arg-type]
        address = fake_torch.allocate(2 * MIB)
    fake_torch.split(address, (MIB, LIVE, {"requested_size": 100}), (MIB, FREE, {"requested_size": 7}))
    found = blocks(fake_torch, store, ResumedBlocks())
    assert [(block.address, block.bytes, block.of_graphs) for block in found] == [
        (address, 100, True),
        (address + MIB, MIB, True),
    ]
    fake_torch.free(address)


def test_frames_of_a_block(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    address = allocate(saver, fake_torch)
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    fake_torch.split(address, (MIB, LIVE, {"frames": frames}), (MIB, LIVE, {"frames": []}))
    assert [block.frames for block in blocks(fake_torch, store, ResumedBlocks())] == [frames, None]
