"""Guards which allocations a pause or a resume selects: tags, mixtures, repetition, and SGLang's order."""

from __future__ import annotations

import pytest
from gpu_support import (
    LARGE,
    MIB,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_normal,
    fill_random,
    free_bytes,
    saver,
    state_of,
    tms,
    torch,
    write_and_check,
)


def test_pause_twice_and_resume_twice_are_fine() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(64 * MIB)
    fill_random(tensor, 1)
    expected = checksum(tensor)
    assert saver.resume("weights").allocations == 0
    assert saver.pause("weights").allocations == 1
    before = free_bytes()
    report = saver.pause("weights")
    assert (report.allocations, report.bytes, report.copied_bytes) == (0, 0, 0)
    assert free_bytes() == before
    assert saver.resume("weights").allocations == 1
    report = saver.resume("weights")
    assert (report.allocations, report.bytes, report.copied_bytes) == (0, 0, 0)
    assert checksum(tensor) == expected


def test_pause_of_an_unknown_tag_changes_nothing() -> None:
    with saver.region(tag="weights"):
        tensor = empty(64 * MIB)
    before = free_bytes()
    report = saver.pause("unused tag")
    assert (report.allocations, report.bytes, report.unknown_tags) == (0, 0, 1)
    assert saver.resume("unused tag").allocations == 0
    assert free_bytes() == before
    write_and_check(tensor, 1)


def test_tags_are_independent_and_none_means_all() -> None:
    tensors = {}
    for tag in ("a", "b", "c"):
        with saver.region(tag=tag):
            tensors[tag] = empty(128 * MIB)

    def states() -> str:
        names = {core.STATE_ACTIVE: "A", core.STATE_PAUSED: "P"}
        return "".join(names[state_of(tensor)] for tensor in tensors.values())

    assert states() == "AAA"
    start = free_bytes()
    saver.pause("b")
    assert states() == "APA"
    assert_close_to(free_bytes() - start, 128 * MIB, "free memory gained")
    write_and_check(tensors["a"], 1)
    assert saver.pause().allocations == 2
    assert states() == "PPP"
    saver.resume(["a", "c"])
    assert states() == "APA"
    assert saver.pause(("a",)).allocations == 1
    assert states() == "PPA"
    assert saver.resume(None).allocations == 2
    assert states() == "AAA"
    assert_close_to(free_bytes(), start, "free memory at the end")
    for value, tensor in enumerate(tensors.values()):
        write_and_check(tensor, value)


def test_pause_one_tag_then_resume_everything() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(64 * MIB)
    with saver.region(tag="kv_cache"):
        cache = empty(64 * MIB)
    fill_random(weights, 4)
    expected = checksum(weights)
    cache.fill_(9)
    saver.pause("weights")
    saver.resume()
    assert checksum(weights) == expected
    assert bool((cache == 9).all()), "what was active has kept its contents"


def test_sglang_order_with_an_empty_cache_while_kv_cache_is_paused() -> None:
    """Out: kv_cache, weights, cuda_graph; in: cuda_graph, weights, kv_cache. Buffers are cloned before and copied back."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.empty(LARGE // (4 * MIB), 1024, 1024, device="cuda")
        buffers = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    with saver.region(tag="kv_cache"):
        cache = [empty(LARGE // 2) for _ in range(4)]
        surplus = empty(LARGE // 2)
    fill_normal(weights, 1)
    result = torch.zeros(1024, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(cuda_graph=graph, pool=None, stream=None, capture_error_mode="global", tag="cuda_graph"):
        result.copy_((weights * 2).sum(0) + buffers.view(1024, 1024))
    graph.replay()
    expected = result.clone()
    addresses = [tensor.data_ptr() for tensor in (weights, buffers, *cache)]
    saved = buffers.clone()
    start = free_bytes()

    saver.pause("kv_cache")
    del surplus
    torch.cuda.empty_cache()
    tms.empty_cache()
    saver.pause("weights")
    saver.pause("cuda_graph")
    assert {row.state for row in core.segments()} == {core.STATE_PAUSED}
    assert core.counters()["resident_bytes"] == 0
    training = empty(2 * LARGE)
    training.fill_(0x5A)
    del training
    torch.cuda.empty_cache()
    result.zero_()
    saver.resume("cuda_graph")
    saver.resume("weights")
    saver.resume("kv_cache")

    assert [tensor.data_ptr() for tensor in (weights, buffers, *cache)] == addresses
    buffers.copy_(saved)
    graph.replay()
    assert torch.equal(result, expected)
    for value, tensor in enumerate(cache):
        write_and_check(tensor, value)
    assert_close_to(free_bytes() - start, LARGE // 2, "free memory gained by the deleted cache", slack=LARGE // 16)
    del graph, weights, buffers, cache, tensor


def test_tensors_freed_while_paused() -> None:
    with saver.region(tag="kv_cache"):
        keep, drop = empty(256 * MIB), empty(256 * MIB)
    start = free_bytes()
    saver.pause("kv_cache")
    dropped = drop.data_ptr()
    del drop
    tms.empty_cache()
    assert core.find(dropped) is None, "freed although paused"
    assert core.counters()["allocations"] == 1
    assert_close_to(free_bytes() - start, 512 * MIB, "free memory gained")
    assert saver.resume("kv_cache").allocations == 1
    write_and_check(keep, 2)
    assert_close_to(free_bytes() - start, 256 * MIB, "free memory gained at the end")


@pytest.mark.parametrize("tag", ["", 3, None, ["a", ""], ["a", 5], b"weights"])
def test_a_tag_must_be_a_string_that_is_not_empty(tag: object) -> None:
    with saver.region(tag="weights"):
        tensor = empty(2 * MIB)
    with pytest.raises((errors.TorchMemorySaverError, TypeError, ValueError)), saver.region(tag=tag):  # type: ignore[arg-type]
        pass
    if tag is not None and tag != "":  # which are every tag
        with pytest.raises((errors.TorchMemorySaverError, TypeError, ValueError)):
            saver.pause(tag)  # type: ignore[arg-type]
    assert state_of(tensor) == core.STATE_ACTIVE


def test_any_string_is_a_tag() -> None:
    tags = ["weights:é¢ß", "a b\tc", "x" * 300, "None"]
    tensors = []
    for tag in tags:
        with saver.region(tag=tag):
            tensors.append(empty(4 * MIB))
    for tag, tensor in zip(tags, tensors, strict=True):
        assert core.find(tensor.data_ptr()).tag == tag  # type: ignore[union-attr]
        assert saver.pause(tag).allocations == 1
        assert state_of(tensor) == core.STATE_PAUSED
        saver.resume(tag)
    del tensors, tensor
