"""Guards that a host copy that stays after a resume is only given out for the tensor that was there at the pause. PyTorch
gives the place of a deleted tensor to a later one, without a call of the driver."""

from __future__ import annotations

import pytest
from core_regions import core_region
from gpu_programs import Program, run_programs
from gpu_support import MIB, core, saver, segment_of, tensor_at, torch

#: Tensors of this size share a segment of PyTorch.
SMALL = 256 << 10
#: The segment has no other tensor.
LARGE = 32 * MIB


def retained(size: int, value: int, tag: str = "weights") -> torch.Tensor:
    with saver.region(tag, backup="host", host_memory="retain"):
        return torch.full((size,), value, dtype=torch.uint8, device="cuda")


def cycle(tag: str = "weights") -> None:
    saver.pause(tag)
    saver.resume(tag)


def assert_no_copy(x: torch.Tensor) -> None:
    assert saver.get_cpu_backup(x) is None
    assert saver.get_cpu_backup(x, zero_copy=True) is None


def assert_copy(x: torch.Tensor, value: int) -> None:
    for zero_copy in (False, True):
        copy = saver.get_cpu_backup(x, zero_copy=zero_copy)
        assert copy is not None
        assert copy.shape == x.shape
        assert bool((copy == value).all())


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_tensor_at_the_place_of_a_deleted_one(size: int) -> None:
    old, neighbour = retained(size, 1), retained(size, 2)
    place = old.data_ptr()
    cycle()
    assert_copy(old, 1)
    del old
    new = retained(size, 9)
    assert new.data_ptr() == place
    assert_no_copy(new)
    for _ in range(2):
        cycle()
        assert_copy(new, 9)
        assert_copy(neighbour, 2)


def test_a_tensor_that_was_deleted_while_it_was_paused() -> None:
    old, neighbour = retained(SMALL, 1), retained(SMALL, 2)
    place = old.data_ptr()
    saver.pause("weights")
    del old
    saver.resume("weights")
    assert_copy(neighbour, 2)
    new = retained(SMALL, 9)
    assert new.data_ptr() == place
    assert_no_copy(new)


def test_tensors_at_other_borders_than_the_deleted_ones() -> None:
    """A part of a block, one at an address inside a block, and one over several blocks."""
    first, second, third, neighbour = (retained(SMALL, value) for value in range(4))
    place = first.data_ptr()
    cycle()
    del first, second, third
    half, inside, across = retained(SMALL // 2, 7), retained(SMALL // 2, 8), retained(2 * SMALL, 9)
    assert [each.data_ptr() - place for each in (half, inside, across)] == [0, SMALL // 2, SMALL]
    for each in (half, inside, across):
        assert_no_copy(each)
    cycle()
    for each, value in ((half, 7), (inside, 8), (across, 9), (neighbour, 3)):
        assert_copy(each, value)


@pytest.mark.parametrize("live_only", [True, False])
def test_a_tensor_in_a_block_that_was_free_at_the_pause(live_only: bool) -> None:
    old, neighbour = retained(SMALL, 1), retained(SMALL, 2)
    place = old.data_ptr()
    del old
    saver.pause("weights", live_only=live_only)
    saver.resume("weights")
    assert_copy(neighbour, 2)
    new = retained(SMALL, 9)
    assert new.data_ptr() == place
    assert_no_copy(new)


def test_memory_that_the_driver_got_back() -> None:
    old = retained(LARGE, 1)
    place = old.data_ptr()
    cycle()
    del old
    saver.empty_cache()
    assert core.find(place) is None
    assert_no_copy(retained(LARGE, 9))


def test_tensors_keep_their_copies_until_their_region_is_entered() -> None:
    """Regions with other options have other pools, and the pool of a thread that is inside one is not entered."""
    weights, others = retained(LARGE, 1), retained(LARGE, 2, "others")
    cycle()
    cycle("others")
    with saver.region("weights", backup="host"), saver.region("cache"), saver.disable():
        torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    weights.fill_(3)  # the copy has the contents at the pause
    assert_copy(weights, 1)
    assert_copy(weights[100:200], 1)
    temporary = retained(SMALL, 5)
    assert_no_copy(weights)
    assert_copy(others, 2)
    saver.pause("weights")
    assert_copy(weights, 3)
    assert_copy(temporary, 5)
    del temporary
    saver.resume("weights")
    assert_copy(weights, 3)


def test_a_region_that_stays_open() -> None:
    """After the pause, the region allocates from another pool."""
    with saver.region("weights", backup="host", host_memory="retain"):
        weights = torch.full((SMALL,), 1, dtype=torch.uint8, device="cuda")
        cycle()
        later = torch.full((SMALL,), 2, dtype=torch.uint8, device="cuda")
        assert segment_of(later).address != segment_of(weights).address
        assert_copy(weights, 1)
        assert_no_copy(later)
        cycle()
        assert_copy(later, 2)
    assert_copy(weights, 1)


def test_memory_that_not_only_regions_allocate_from() -> None:
    """PyTorch shows outputs of a graph as free, and another library may divide what it allocates."""
    source = torch.full((LARGE,), 4, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    saver.host_memory = "retain"
    with saver.cuda_graph(graph, tag="graph", backup="host"):
        output = source + 1
    graph.replay()
    with core_region("library", core.BACKUP_PINNED):
        address = core.allocate(LARGE, 0)
    outside = tensor_at(address, LARGE)
    outside.fill_(6)
    saver.pause()
    assert_copy(output, 5)
    assert_copy(outside, 6)
    for unchanged in (0, LARGE):  # the program may have written to the copy, but not to one that it did not get
        saver.resume()
        assert_no_copy(output)
        assert_no_copy(outside)
        assert saver.pause("library").unchanged_bytes == unchanged
    saver.resume()
    saver.host_memory = "release"
    del outside, output, graph
    assert core.free(address)


@pytest.mark.outer
def test_pytorchs_own_pool() -> None:
    variables = (("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1"), ("TMS_HOST_MEMORY", "retain"))
    (done,) = run_programs([Program("default_pool_backups.py", environment=variables, preload=True)])
    assert done.check().output.split() == ["ok"]
