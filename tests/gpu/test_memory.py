"""Guards physical memory, addresses and granularity: what a pause releases and a resume allocates."""

from __future__ import annotations

from typing import Any

import pytest
from core_regions import core_region
from gpu_support import (
    GIB,
    GRANULARITY,
    LARGE,
    MIB,
    SIMULATED,
    assert_close_to,
    core,
    empty,
    errors,
    free_bytes,
    process_bytes,
    saver,
    segment_of,
    state_of,
    tensor_at,
    tms,
    torch,
    write_and_check,
)


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, LARGE), (12 if SIMULATED else 64, LARGE), (40 if SIMULATED else 2000, 16 * MIB)],
    ids=["one large", "many large", "many small"],
)
def test_pause_gives_physical_memory_back_and_resume_takes_it_at_the_same_addresses(count: int, size: int) -> None:
    if torch.cuda.mem_get_info()[0] < count * size + 8 * LARGE:
        pytest.skip(f"needs {(count * size + 8 * LARGE) / GIB:.0f} GiB of free memory")
    with saver.region(tag="weights"):
        tensors = [empty(size) for _ in range(count)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(set(addresses)) == count
    assert {segment_of(tensor).tag for tensor in tensors} == {"weights"}
    resident = core.counters()["resident_bytes"]
    assert resident == count * size
    active = free_bytes()
    ours_active = process_bytes()

    report = saver.pause("weights")
    paused = free_bytes()
    assert (report.allocations, report.bytes, report.copied_bytes) == (count, count * size, 0)
    assert_close_to(paused - active, count * size, "free memory gained by the pause")
    ours_paused = process_bytes()
    if ours_active is not None and ours_paused is not None:
        assert_close_to(ours_active - ours_paused, count * size, "memory of this process given back, by nvidia-smi")
    assert {state_of(tensor) for tensor in tensors} == {core.STATE_PAUSED}
    counters = core.counters()
    assert (counters["resident_bytes"], counters["paused_bytes"]) == (0, count * size)

    # Another user has it meanwhile.
    other = empty(count * size // 2)
    write_and_check(other[: 256 * MIB], 3)
    del other
    torch.cuda.empty_cache()

    report = saver.resume("weights")
    assert (report.allocations, report.bytes) == (count, count * size)
    assert_close_to(paused - free_bytes(), count * size, "free memory taken by the resume")
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for index, tensor in enumerate(tensors):
        tensor.fill_(index % 251)
    sums = [int(tensor[:: size // 64].to(torch.int64).sum()) for tensor in tensors]
    expected = [len(range(0, size, size // 64)) * (index % 251) for index in range(count)]
    assert sums == expected


def test_memory_of_deleted_tensors_is_released_to_the_driver() -> None:
    before = free_bytes()
    with saver.region(tag="kv_cache"):
        tensors = [empty(LARGE // 2) for _ in range(4)]
    assert_close_to(before - free_bytes(), 2 * LARGE, "memory taken")
    del tensors
    tms.empty_cache()
    assert core.counters()["allocations"] == 0
    assert_close_to(free_bytes() - before, 0, "memory not given back")


@pytest.mark.parametrize(
    ("size", "physical"),
    [(1, GRANULARITY), (GRANULARITY, GRANULARITY), (GRANULARITY + 1, 2 * GRANULARITY), (5 * MIB, 6 * MIB)],
)
def test_physical_memory_comes_in_multiples_of_two_mebibytes(size: int, physical: int) -> None:
    before = free_bytes()
    with core_region("granularity", core.BACKUP_NONE, True):
        addresses = [core.allocate(size) for _ in range(64)]
    assert all(address % GRANULARITY == 0 for address in addresses)
    for address in addresses:
        found = core.find(address)
        assert found is not None
        assert (found.address, found.bytes, found.reserved_bytes) == (address, size, physical)
    assert_close_to(before - free_bytes(), 64 * physical, "memory taken", slack=8 * MIB)
    assert core.find(addresses[0] + physical - 1) is not None
    saver.pause("granularity")
    assert_close_to(before - free_bytes(), 0, "memory still taken while paused", slack=8 * MIB)
    saver.resume("granularity")
    last = tensor_at(addresses[-1], size)
    write_and_check(last, 7)
    del last
    for address in addresses:
        assert core.free(address)
        assert core.find(address) is None
        assert not core.free(address)


def test_size_zero_and_absurd_sizes() -> None:
    assert core.allocate(0) == 0
    before = core.counters()["allocations"]
    for size in (1 << 46, 1 << 62):
        with pytest.raises(torch.OutOfMemoryError):
            core.allocate(size)
    assert core.counters()["allocations"] == before
    with saver.region(tag="zero"):
        nothing = torch.empty(0, dtype=torch.uint8, device="cuda")
    assert nothing.numel() == 0


def test_tensors_of_a_region_share_segments_as_in_any_torch_pool() -> None:
    with saver.region(tag="small"):
        tensors = [empty(4096) for _ in range(64)]
    assert len({segment_of(tensor).address for tensor in tensors}) == 1
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    saver.pause("small")
    saver.resume("small")
    for index, tensor in enumerate(tensors):
        write_and_check(tensor, index)


def test_a_managed_tensor_behaves_like_any_other() -> None:
    """Copies to and from the host, kernels on it from a side stream, views."""
    with saver.region(tag="weights"):
        numbers = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    host = numbers.cpu()
    assert torch.equal(host, torch.arange(1 << 20, dtype=torch.float32))
    pinned = torch.full((1 << 20,), 2.0, pin_memory=True)
    numbers.copy_(pinned, non_blocking=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        numbers.mul_(3)
    torch.cuda.current_stream().wait_stream(side)
    assert numbers.view(1024, 1024)[5].sum().item() == 6 * 1024


# -- access to paused memory -------------------------------------------------------------------------------------------


def test_is_paused_reports_tensors_that_must_not_be_accessed() -> None:
    with saver.region(tag="kv_cache"):
        cache = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    ordinary = torch.ones(4, device="cuda")
    tensors = (cache, cache[100:101], weights, weights.t()[3:], weights.detach()[5, 7], ordinary, ordinary.cpu())
    sparse = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64, device="cuda"), ordinary[:1], (2, 2), check_invariants=False
    )

    def paused() -> list[bool]:
        return [saver.is_paused(tensor) for tensor in tensors]

    assert not any(paused())
    saver.pause("kv_cache")
    assert paused() == [True, True, False, False, False, False, False]
    saver.pause("weights")
    assert paused() == [True, True, True, True, True, False, False]
    assert tms.is_paused(weights)
    saver.resume("kv_cache")
    assert paused() == [False, False, True, True, True, False, False]
    assert not saver.is_paused(torch.empty(0, device="cuda"))
    for wrong in (sparse, 5, None, weights.data_ptr()):
        with pytest.raises(errors.InvalidArgumentError, match="is_paused"):
            saver.is_paused(wrong)  # type: ignore[arg-type]
    saver.resume("weights")
    assert not any(paused())


def pair_of(first: torch.Tensor, second: torch.Tensor) -> Any:
    """A tensor made of two others, as torch has one for its own tests."""
    from torch.testing._internal.two_tensor import TwoTensor as Pair

    return Pair(first, second)


def test_is_paused_looks_into_tensors_that_are_made_of_others() -> None:
    with saver.region(tag="weights"):
        managed = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    ordinary = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    pairs = (pair_of(managed, ordinary), pair_of(ordinary, managed), pair_of(ordinary, ordinary))
    parameter = torch.nn.Parameter(managed, requires_grad=False)
    assert not any(saver.is_paused(tensor) for tensor in (*pairs, parameter))
    saver.pause("weights")
    assert [saver.is_paused(tensor) for tensor in (*pairs, parameter)] == [True, True, False, True]
    saver.resume("weights")


def test_a_copy_of_a_paused_tensor_is_refused_and_harms_nothing() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = torch.full((2 * MIB,), 7, dtype=torch.uint8, device="cuda")
    other = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    host = torch.zeros(2 * MIB, dtype=torch.uint8)
    saver.pause("weights")
    for copy in (tensor.cpu, lambda: tensor[3].item(), lambda: other.copy_(tensor), lambda: tensor.copy_(host)):
        with pytest.raises(RuntimeError, match="invalid argument"):
            copy()
    saver.resume("weights")
    assert int(tensor.min()) == int(tensor.max()) == 7
    assert int(other.max()) == 0
