"""Guards tags by pattern with PyTorch: namespaces of several models, names that look like patterns, regions of other
threads, resumes in the background, shared memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from gpu_support import (
    MIB,
    core,
    empty,
    errors,
    saver,
    state_of,
    torch,
    write_and_check,
)
from sent_tensors import drop_counter, share


def in_region(tag: str, size: int = 4 * MIB) -> torch.Tensor:
    with saver.region(tag=tag):
        return empty(size)


def paused(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {tag for tag, tensor in tensors.items() if state_of(tensor) == core.STATE_PAUSED}


def test_each_model_has_a_namespace() -> None:
    names = ["engine0/weights", "engine0/kv_cache", "engine1/weights", "actor/weights", "ref"]
    tensors = {tag: in_region(tag) for tag in names}
    assert saver.pause("engine0/*").allocations == 2
    assert paused(tensors) == {"engine0/weights", "engine0/kv_cache"}
    assert saver.pause(["*/weights", "ref"]).allocations == 3
    assert paused(tensors) == set(names)
    assert saver.resume(["actor/*", "ref"]).allocations == 2
    assert paused(tensors) == {"engine0/weights", "engine0/kv_cache", "engine1/weights"}
    assert saver.resume("engine?/*", wait=False).wait().allocations == 3
    assert paused(tensors) == set()
    report = saver.pause("engine[5-9]/*")
    assert (report.allocations, report.unknown_tags) == (0, 1)
    for number, tensor in enumerate(tensors.values()):
        write_and_check(tensor, number)


def test_a_tag_that_looks_like_a_pattern_is_meant_by_its_name() -> None:
    names = ["p/a*", "p/ab", "p/a?", "p/[ab]", "p/a"]
    tensors = {tag: in_region(tag) for tag in names}
    for tag in ("p/a*", "p/a?", "p/[ab]"):
        assert saver.pause(tag).allocations == 1
        assert paused(tensors) == {tag}
        assert saver.resume(tag).allocations == 1
    assert saver.pause("p/a[*]").allocations == 1
    assert paused(tensors) == {"p/a*"}
    assert saver.pause("p/*").allocations == 4
    assert saver.resume(names).allocations == 5


def test_preserved_takes_patterns() -> None:
    tensors = [in_region(f"q{number}/scales") for number in range(3)]
    handle = saver.preserve(tensors)
    assert len(saver.preserved()) == len(saver.preserved("q*/scales")) == 3
    assert {block.tag for block in saver.preserved("q[12]*")} == {"q1/scales", "q2/scales"}
    assert saver.preserved("q?") == ()
    handle.remove()


@pytest.mark.parametrize("if_shared", ["refuse", "wait"])
def test_memory_that_others_may_use_counts_by_pattern(if_shared: Any) -> None:
    tensor, other = in_region("shared/a"), in_region("other/a")
    sent = share(tensor)
    with pytest.raises(errors.InvalidStateError, match="other processes may still use"):
        saver.pause("shared/*", if_shared=if_shared, timeout=0.05 if if_shared == "wait" else None)
    assert state_of(tensor) == core.STATE_ACTIVE
    assert saver.pause("other/*", if_shared="refuse").allocations == 1
    drop_counter(sent)
    saver.resume()
    del tensor, other


def test_a_region_of_another_thread() -> None:
    """Its tag is selected once an allocation has had it, as long as another thread is inside."""
    first = in_region("r/first")
    held: list[torch.Tensor] = []
    inside, go_on = threading.Event(), threading.Event()
    allocated, leave = threading.Event(), threading.Event()

    def work() -> None:
        with saver.region(tag="r/late"):
            inside.set()
            go_on.wait(60)
            held.append(empty(4 * MIB))
            allocated.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(60)
        assert saver.pause("r/*").allocations == 1
        go_on.set()
        assert allocated.wait(60)
        assert state_of(held[0]) == core.STATE_ACTIVE, "the tag has appeared since the pause"
        write_and_check(held[0], 3)
        saver.resume("r/*")
        with pytest.raises(errors.InvalidStateError, match="r/late"):
            saver.pause("r/*", timeout=0)
        assert state_of(first) == core.STATE_ACTIVE
    finally:
        go_on.set()
        leave.set()
        thread.join(60)
    assert saver.pause("r/*").allocations == 2
    saver.resume("r/*")


def test_graph_pools_by_pattern() -> None:
    graph = torch.cuda.CUDAGraph()
    source = torch.ones(MIB, device="cuda")
    with saver.cuda_graph(graph, tag="g0/cuda_graph"):
        result = source * 2
    weights = in_region("g0/weights")
    assert saver.pause("g0/*").allocations >= 2
    assert saver.is_paused(result)
    assert saver.is_paused(weights)
    saver.resume("g0/*")
    graph.replay()
    assert bool((result == 2).all())
    del graph


@pytest.mark.multigpu
def test_both_devices() -> None:
    tensors = []
    for device in range(2):
        with saver.region(tag=f"d{device}/weights"):
            tensors.append(empty(4 * MIB, device))
    assert saver.pause("d*/weights").allocations == 2
    assert all(saver.is_paused(tensor) for tensor in tensors)
    assert saver.resume("d1/*").allocations == 1
    assert [saver.is_paused(tensor) for tensor in tensors] == [True, False]
    saver.resume()
