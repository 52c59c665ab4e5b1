"""Guards memory shortage: in a region, at a resume, by the margin. Each is an exception that leaves everything usable."""

from __future__ import annotations

import re

import pytest
from gpu_support import (
    LARGE,
    MIB,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    is_managed,
    saver,
    state_of,
    take_all_but,
    torch,
    write_and_check,
)
from waiting import while_waiting

from torch_memory_saver.simulate import parse_bytes


def test_a_region_finds_memory_that_torch_only_caches() -> None:
    """torch does not empty its cache for a pool that runs out; the entry of the region has to."""
    free = free_bytes()
    cached = empty(free * 8 // 10 // (2 * MIB) * (2 * MIB))
    del cached
    assert torch.cuda.memory_reserved() >= free * 7 // 10
    with saver.region(tag="weights"):
        tensor = empty(free * 6 // 10 // (2 * MIB) * (2 * MIB))
    assert is_managed(tensor)
    write_and_check(tensor[-64 * MIB :], 1)


def test_a_graph_pool_finds_memory_that_torch_only_caches() -> None:
    free = free_bytes()
    cached = empty(free * 8 // 10 // (2 * MIB) * (2 * MIB))
    del cached
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="cuda_graph"):
        tensor = empty(free * 6 // 10 // (2 * MIB) * (2 * MIB))
        tensor[-64 * MIB :].zero_()
    assert is_managed(tensor)
    graph.replay()
    assert int(tensor[-64 * MIB :].max()) == 0
    del graph, tensor


def test_out_of_memory_in_a_region_is_torchs_own_error_and_everything_works() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        before = empty(64 * MIB)
        fill_random(before, 1)
        expected = checksum(before)
        total = torch.cuda.mem_get_info()[1]
        start = free_bytes()
        with pytest.raises(torch.OutOfMemoryError):
            empty(2 * total)
        assert_close_to(free_bytes(), start, "free memory after the failure", slack=4 * MIB)
        after = empty(64 * MIB)
    saver.pause("weights")
    saver.resume("weights")
    assert checksum(before) == expected
    write_and_check(after, 2)


def test_out_of_memory_in_a_region_because_others_hold_the_memory() -> None:
    other = take_all_but(2 * LARGE)
    with saver.region(tag="weights"):
        with pytest.raises(torch.OutOfMemoryError):
            empty(3 * LARGE)
        tensor = empty(LARGE)
    write_and_check(tensor, 3)
    with pytest.raises(errors.OutOfMemoryError) as caught:
        core.allocate(3 * LARGE)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.device == 0
    assert caught.value.bytes >= 3 * LARGE
    assert caught.value.driver_call == "cuMemCreate"
    del other


def test_out_of_memory_at_resume_leaves_everything_paused_and_can_be_repeated() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = [empty(LARGE // 4) for _ in range(8)]
    with saver.region(tag="kv_cache"):
        cache = empty(LARGE)
    for seed, tensor in enumerate(weights):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in weights]
    addresses = [tensor.data_ptr() for tensor in weights]
    saver.pause()
    other = take_all_but(LARGE)
    free = free_bytes()
    counters = core.counters()
    for _ in range(2):
        with pytest.raises(errors.OutOfMemoryError) as caught:
            saver.resume("weights")
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert "cuMemCreate" in str(caught.value)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
        assert {state_of(tensor) for tensor in weights} == {core.STATE_PAUSED}
        assert state_of(cache) == core.STATE_PAUSED
        assert_close_to(free_bytes(), free, "free memory after the failed resume", slack=4 * MIB)
        now = core.counters()
        for name in ("resident_bytes", "paused_bytes", "host_backup_bytes", "damaged", "quarantined_handles"):
            assert now[name] == counters[name], name
    del other
    torch.cuda.empty_cache()
    report = saver.resume()
    assert report.allocations == 9
    assert [tensor.data_ptr() for tensor in weights] == addresses
    assert [checksum(tensor) for tensor in weights] == sums
    write_and_check(cache, 1)
    del weights, tensor


def test_out_of_memory_at_resume_keeps_active_tags_active() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(LARGE // 4)
    with saver.region(tag="kv_cache"):
        cache = [empty(LARGE) for _ in range(4)]
    fill_random(weights, 5)
    expected = checksum(weights)
    saver.pause()
    other = take_all_but(LARGE)
    assert saver.resume("weights").allocations == 1
    with pytest.raises(errors.OutOfMemoryError):
        saver.resume()
    assert state_of(weights) == core.STATE_ACTIVE
    assert checksum(weights) == expected
    assert {state_of(tensor) for tensor in cache} == {core.STATE_PAUSED}
    del other
    torch.cuda.empty_cache()
    saver.resume()
    for value, tensor in enumerate(cache):
        write_and_check(tensor, value)
    del cache, tensor


def test_resume_waits_for_memory_until_its_timeout() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(2 * LARGE)
    fill_random(weights, 6)
    expected = checksum(weights)
    saver.pause("weights")
    other = [take_all_but(LARGE)]
    failures = core.counters()["failures_total"]
    with pytest.raises(errors.OutOfMemoryError, match=r"missing after \d+\.\d seconds"):
        saver.resume("weights", timeout=0.2)
    assert core.counters()["failures_total"] == failures + 1, "the attempts of one call are one failure"
    assert state_of(weights) == core.STATE_PAUSED

    def give_back() -> None:
        other.clear()
        torch.cuda.empty_cache()

    with while_waiting(give_back, lambda: state_of(weights) == core.STATE_PAUSED):
        report = saver.resume("weights", timeout=60)
    assert report.allocations == 1
    assert core.counters()["failures_total"] == failures + 1
    assert checksum(weights) == expected


def cache_all_but(left: int) -> None:
    """Has torch cache all free memory but `left` bytes."""
    assert take_all_but(left).numel() >= LARGE


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("wait", [True, False])
def test_resume_finds_memory_that_torch_only_caches(timeout: float | None, wait: bool) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(2 * LARGE)
    fill_random(weights, 7)
    expected = checksum(weights)
    saver.pause("weights")
    cache_all_but(LARGE)
    failures = core.counters()["failures_total"]
    report = (
        saver.resume("weights", timeout=timeout) if wait else saver.resume("weights", timeout=timeout, wait=False).wait()
    )
    assert report.allocations == 1
    assert core.counters()["failures_total"] == failures
    assert checksum(weights) == expected


def test_resume_finds_memory_that_torch_only_caches_inside_a_region() -> None:
    with saver.region(tag="weights"):
        weights = empty(2 * LARGE)
    saver.pause("weights")
    with saver.region(tag="other"):
        cache_all_but(LARGE)
        assert saver.resume("weights").allocations == 1
        assert is_managed(empty(LARGE))
    write_and_check(weights, 1)


def test_resume_reports_what_torchs_cache_released() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(4 * LARGE)
    fill_random(weights, 8)
    expected = checksum(weights)
    saver.pause("weights")
    other = take_all_but(2 * LARGE)
    cache_all_but(LARGE)
    free = free_bytes()
    with pytest.raises(errors.OutOfMemoryError, match="emptied before, which gave") as caught:
        saver.resume("weights", timeout=0.1)
    said = re.search(r"which gave (.+) back", str(caught.value))
    assert said is not None
    given = parse_bytes(said[1])
    assert_close_to(given, free_bytes() - free, "what the cache gave", slack=64 * MIB)  # a text of one decimal
    assert given >= LARGE
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert state_of(weights) == core.STATE_PAUSED
    with pytest.raises(errors.OutOfMemoryError) as caught:
        saver.resume("weights")
    assert "cache in this process was emptied" not in str(caught.value)
    del other
    assert saver.resume("weights").allocations == 1
    assert checksum(weights) == expected


def test_with_room_for_the_resume_torchs_cache_stays() -> None:
    with saver.region(tag="weights"):
        weights = empty(LARGE)
    saver.pause("weights")
    cached = empty(LARGE)
    del cached
    reserved = torch.cuda.memory_reserved()
    saver.resume("weights")
    assert torch.cuda.memory_reserved() == reserved
    write_and_check(weights, 1)


def test_memory_margin() -> None:
    assert saver.memory_margin_bytes == 0
    saver.memory_margin_bytes = free_bytes() - LARGE
    with saver.region(tag="weights"):
        with pytest.raises(torch.OutOfMemoryError):
            empty(2 * LARGE)
        small = empty(LARGE // 4)
    ordinary = empty(2 * LARGE)
    write_and_check(small, 1)
    del ordinary
    saver.memory_margin_bytes = 0
    with saver.region(tag="weights"):
        large = empty(2 * LARGE)
    write_and_check(large, 2)
    with pytest.raises((errors.TorchMemorySaverError, ValueError, OverflowError)):
        saver.memory_margin_bytes = -1
    assert saver.memory_margin_bytes == 0
