"""Guards entries and exits of regions against signals, with PyTorch: a handler that raises, between any two bytecodes."""

from __future__ import annotations

import functools
import signal
import threading
from typing import Any

import pytest
from gpu_support import MIB, core, empty, is_managed, saver, torch
from interruptions import Interruption, every_interruption, interrupted, places_of
from other_threads import in_thread

from torch_memory_saver._engine.process import ordinary_pools
from torch_memory_saver._torch.binding import layer

#: The distance of two places at which an interruption is tried. The unit tests try every place.
STEP = 60
#: Where each try costs much: a capture collects garbage.
LONG_STEP = 211
#: How many places are tried where each try leaves pools, so that the next one has more places.
TRIES = 60


def check(kept: Any, place: int) -> None:
    """No region is in force, ordinary tensors are ordinary, and another thread can pause at once."""
    assert core.region_current().depth == 0, place
    assert not is_managed(empty(MIB)), place
    assert torch._C._is_multithreading_enabled(), place
    in_thread(lambda: saver.pause("interrupted"))
    saver.resume("interrupted")
    assert int(kept[0]) == 7, place


def make_kept() -> Any:
    with saver.region("interrupted", enable_cpu_backup=True):
        return torch.full((MIB,), 7, dtype=torch.uint8, device="cuda")


def test_a_region() -> None:
    kept = make_kept()
    region = saver.region("interrupted", enable_cpu_backup=True)

    def use() -> None:
        with region:
            pass

    use()
    place = -1
    for place in every_interruption(use, STEP):
        check(kept, place)
    assert place > 100
    check(kept, -1)


def test_a_first_region_of_a_tag_on_every_device() -> None:
    kept = make_kept()
    number = 0
    device = torch.cuda.current_device()

    def use() -> None:
        nonlocal number
        number += 1
        with saver.region(f"interrupted {number}"):
            pass

    places = places_of(use)
    assert places > 100
    for place in range(0, places, max(1, places // TRIES)):
        assert interrupted(use, place), place
        assert core.region_current().depth == 0, place
        assert not is_managed(empty(MIB)), place
        assert torch.cuda.current_device() == device, place
    check(kept, -1)


def test_an_inner_region_and_disable() -> None:
    kept = make_kept()

    def use() -> None:
        with saver.region("inner"), saver.disable():
            assert not is_managed(empty(MIB))

    with saver.region("interrupted", enable_cpu_backup=True):
        use()
        for place in every_interruption(use, STEP):
            assert core.region_current()[:1] == ("interrupted",), place
            assert core.region_current().depth == 1, place
            assert is_managed(empty(MIB)), place
    check(kept, -1)


def test_memory_outside_regions() -> None:
    """The workspaces of cuBLAS and the states of generators are made in a pool of their own, inside regions and captures."""
    kept = make_kept()
    found = layer.require()

    def use() -> None:
        core.within(ordinary_pools.routed(found, 0), functools.partial(empty, MIB))

    with saver.region("interrupted", enable_cpu_backup=True):
        use()
        place = -1
        for place in every_interruption(use):
            assert core.region_current()[:1] == ("interrupted",), place
            assert core.region_current().depth == 1, place
            assert is_managed(empty(MIB)), place
    assert place > 100
    check(kept, -1)


def test_a_capture() -> None:
    kept = make_kept()
    source = torch.ones(1 << 10, device="cuda")
    stream = torch.cuda.current_stream()

    graphs: list[torch.cuda.CUDAGraph] = []  # their end is not what is interrupted

    def use() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        with saver.cuda_graph(graphs[-1], tag="interrupted graph"):
            source.mul_(1)

    use()
    for place in every_interruption(use, LONG_STEP):
        graphs.clear()
        assert core.counters()["visible_captures"] == 0, place
        assert not torch.cuda.is_current_stream_capturing(), place
        assert torch.cuda.current_stream() == stream, place
        check(kept, place)
        assert torch.rand(1, device="cuda").item() < 1, place
    in_thread(use)  # nothing that captures of other threads wait for is held
    graphs[-1].replay()
    assert int(source.sum()) == 1 << 10


def test_real_signals() -> None:
    """A handler that the interpreter itself runs, at the places that the timer hits."""
    kept = make_kept()
    region = saver.region("interrupted", enable_cpu_backup=True)

    def handler(number: int, frame: Any) -> None:
        raise Interruption

    def use(attempt: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 2e-5 * (1 + attempt % 50))
        while True:
            with region:
                pass

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for attempt in range(100):
            with pytest.raises(Interruption):
                use(attempt)
            check(kept, attempt)
    finally:
        signal.signal(signal.SIGALRM, before)
