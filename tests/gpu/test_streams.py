"""Guards work in flight: a pause waits for it, and so does a free of memory that it may still use."""

from __future__ import annotations

import threading

import pytest
from gpu_support import MIB, checksum, core, empty, fill_random, hold_stream, saver, tensor_at, tms, torch


def spin_then_fill(stream: torch.cuda.Stream, tensor: torch.Tensor, value: int) -> torch.cuda.Event:
    """Queues work that takes long and then a write on a stream, and returns an event that follows both."""
    stream.wait_stream(torch.cuda.current_stream())
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        hold_stream()
        tensor.fill_(value)
        done.record(stream)
    return done


@pytest.mark.parametrize("backup", ["none", "pinned", "mmap"])
def test_pause_waits_for_kernels_on_every_stream(backup: str) -> None:
    settings = {} if backup == "none" else {"enable_cpu_backup": True, "cpu_backup_backend": backup}
    with saver.region(tag="weights", **settings):
        tensors = [empty(32 * MIB) for _ in range(4)]
    streams = [torch.cuda.Stream(priority=-(index % 2)) for index in range(4)]
    torch.cuda.synchronize()
    events = [
        spin_then_fill(stream, tensor, index + 1)
        for index, (stream, tensor) in enumerate(zip(streams, tensors, strict=True))
    ]
    assert not any(event.query() for event in events), "the work must be in flight for this test to mean anything"
    saver.pause("weights")
    assert all(event.query() for event in events)
    torch.cuda.synchronize()
    saver.resume("weights")
    for index, tensor in enumerate(tensors):
        if backup != "none":
            assert bool((tensor == index + 1).all())
        tensor.fill_(99)
        assert bool((tensor == 99).all())
    del tensors, tensor


@pytest.mark.parametrize("backup", ["pinned", "mmap"])
def test_copies_in_flight_at_a_pause_arrive(backup: str) -> None:
    """One into managed memory and one out of it, both behind slow work: backup and host get all of it."""
    size = 32 * MIB
    with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend=backup):
        target, source = empty(size), empty(size)
    target.fill_(1)
    fill_random(source, 1)
    sent = torch.full((size,), 0x3C, dtype=torch.uint8, pin_memory=True)
    received = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    expected = source.cpu()
    torch.cuda.synchronize()
    done = []
    for target_of_copy, source_of_copy in ((target, sent), (received, source)):
        stream = torch.cuda.Stream()
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            hold_stream()
            target_of_copy.copy_(source_of_copy, non_blocking=True)
            event.record(stream)
        done.append(event)
    assert not any(event.query() for event in done), "the copies must be in flight for this test to mean anything"
    saver.pause("weights")
    assert all(event.query() for event in done)
    assert torch.equal(received, expected)
    kept = saver.get_cpu_backup(target)
    assert kept is not None and torch.equal(kept, sent)
    saver.resume("weights")
    assert torch.equal(target.cpu(), sent)
    assert torch.equal(source.cpu(), expected)
    del target, source, target_of_copy, source_of_copy


def test_pause_from_another_thread_waits_too() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(32 * MIB)
    torch.cuda.synchronize()
    done = spin_then_fill(torch.cuda.Stream(), tensor, 5)
    failures: list[BaseException] = []

    def pause() -> None:
        try:
            saver.pause("weights")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=pause)
    assert not done.query()
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert failures == []
    assert done.query()
    saver.resume("weights")
    assert bool((tensor == 5).all())


def test_free_of_raw_memory_waits_for_work_on_another_stream() -> None:
    size = 64 * MIB
    address = core.allocate(size)
    tensor = tensor_at(address, size)
    torch.cuda.synchronize()
    done = spin_then_fill(torch.cuda.Stream(), tensor, 1)
    assert not done.query()
    del tensor
    assert core.free(address)
    assert done.query()
    torch.cuda.synchronize()


def test_free_of_a_tensor_waits_for_work_on_another_stream() -> None:
    with saver.region(tag="weights"):
        tensor = empty(64 * MIB)
    address = tensor.data_ptr()
    torch.cuda.synchronize()
    done = spin_then_fill(torch.cuda.Stream(), tensor, 1)
    assert not done.query()
    del tensor
    tms.empty_cache()
    assert core.find(address) is None
    assert done.query()
    torch.cuda.synchronize()


def test_work_queued_after_a_resume_sees_the_contents() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(256 * MIB)
    fill_random(tensor, 3)
    expected = checksum(tensor)
    saver.pause("weights")
    stream = torch.cuda.Stream()
    saver.resume("weights")
    with torch.cuda.stream(stream):
        assert checksum(tensor) == expected


@pytest.mark.parametrize("own_stream", [False, True])
def test_kernels_after_wait_stream_find_memory_and_contents(own_stream: bool) -> None:
    """A cache without contents, which is not copied, and weights that are, resumed in the background."""
    with saver.region(tag="kv_cache"):
        cache = [empty(64 * MIB) for _ in range(16)]
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(64 * MIB)
    fill_random(weights, 4)
    expected = checksum(weights)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    for tags in (["kv_cache"], ["kv_cache", "weights"]):
        saver.pause(["kv_cache", "weights"])
        if len(tags) == 1:
            saver.resume("weights")
        pending = saver.resume(tags, wait=False)
        with torch.cuda.stream(stream):
            pending.wait_stream(stream)
            for index, tensor in enumerate(cache):
                tensor.fill_(index + 1)
            for index, tensor in enumerate(cache):
                assert bool((tensor == index + 1).all())
            assert checksum(weights) == expected
        assert pending.wait().allocations >= 1
    del cache, weights, tensor


def test_wait_stream_on_a_thread_of_its_own() -> None:
    """The thread has no context before: its default stream is device 0's."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(256 * MIB)
    fill_random(weights, 5)
    expected = checksum(weights)
    saver.pause("weights")
    pending = saver.resume("weights", wait=False)
    seen: list[object] = []

    def use(tensor: torch.Tensor) -> None:
        try:
            pending.wait_stream()
            seen.append(checksum(tensor))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=use, args=(weights,))
    thread.start()
    thread.join(60)
    assert seen == [expected]
    assert pending.wait().allocations >= 1
    del weights


def test_threads_allocate_and_free_while_another_pauses_and_resumes() -> None:
    """Allocations of other tags continue during transitions, and nothing is lost or mixed up."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = [empty(16 * MIB) for _ in range(8)]
    for seed, tensor in enumerate(weights):
        fill_random(tensor, seed)
    expected = [checksum(tensor) for tensor in weights]
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0] * 3

    def allocate(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    address = core.allocate(4 * MIB)
                    mine = tensor_at(address, 4 * MIB)
                    mine.fill_(index)
                    assert bool((mine == index).all())
                    del mine
                    assert core.free(address)
                    rounds[index] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=allocate, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        cycles = 0
        while cycles < 20 or (min(rounds) == 0 and not failures):
            saver.pause("weights")
            saver.resume("weights")
            cycles += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert [checksum(tensor) for tensor in weights] == expected
    del weights, tensor
