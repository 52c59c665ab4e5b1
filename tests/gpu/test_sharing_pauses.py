"""Guards pauses of memory that was sent to other processes: what importers see of each generation, what is reported as
possibly shared, and that a pause may refuse or wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    MIB,
    STARTED_PRELOADED,
    assert_close_to,
    core,
    errors,
    fill_random,
    free_bytes,
    release_everything,
    saver,
    segment_of,
    torch,
)
from importers import Importer, contents, message
from sent_tensors import SIZE, drop_counter, share, shared_descriptors, weights

from torch_memory_saver import _core
from torch_memory_saver._text import binary_size


def test_a_pause_completes_while_an_importer_has_the_memory(importer: Importer) -> None:
    tensor = weights()
    old = contents(tensor)
    importer.take("old", message(tensor))
    free = free_bytes()
    report = saver.pause("weights")
    assert (report.bytes, report.possibly_shared_bytes) == (SIZE, SIZE)
    assert_close_to(free_bytes() - free, 0, "freed while the importer has it", slack=4 * MIB)
    assert importer.read("old") == old

    saver.resume("weights")
    assert contents(tensor) == old
    fill_random(tensor, 3)
    torch.cuda.synchronize()
    assert importer.read("old") == old, "the importer has the memory of before the pause"
    importer.take("new", message(tensor))
    assert importer.read("new") == contents(tensor)
    before = free_bytes()
    importer.drop("old")
    assert_close_to(free_bytes() - before, SIZE, "freed by the importer")
    importer.drop("new")
    assert saver.pause("weights").possibly_shared_bytes == 0
    saver.resume("weights")


def test_an_importer_keeps_the_whole_handle(importer: Importer) -> None:
    """An importer keeps all of the memory that shares a handle with what it was sent, slack included."""
    tensors = [weights(tag="whole handle") for _ in range(8)]  # so many that the last ones share a physical handle
    saver.pause("whole handle")
    saver.resume("whole handle")
    old = contents(tensors[-1])
    importer.take("old", message(tensors[-1]))
    del tensors[-2]
    saver.empty_cache()
    assert saver.stats("whole handle").total.slack_bytes == SIZE
    kept = core.export_memory(tensors[-1].data_ptr()).bytes
    assert kept > SIZE
    with pytest.raises(errors.InvalidStateError, match=f"pause: other processes may still use {binary_size(kept)} of"):
        saver.pause("whole handle", backup="host", if_shared="refuse")
    report = saver.pause("whole handle", backup="host")
    saver.resume("whole handle")
    assert report.possibly_shared_bytes == kept
    assert saver.stats("whole handle").total.slack_bytes == 0
    assert contents(tensors[-1]) == importer.read("old") == old
    fill_random(tensors[-1], 5)
    torch.cuda.synchronize()
    assert importer.read("old") == old, "the importer has the memory of before the pause"
    importer.take("new", message(tensors[-1]))
    assert importer.read("new") == contents(tensors[-1])
    importer.drop("old")
    importer.drop("new")


def test_a_pause_may_refuse_or_wait_for_importers() -> None:
    tensor, other = weights(), weights(2 * MIB, tag="other")
    sent = share(tensor)
    for if_shared, timeout in (("refuse", None), ("wait", 0.05)):
        with pytest.raises(
            errors.InvalidStateError, match=f"other processes may still use {binary_size(SIZE)} of"
        ) as caught:
            saver.pause(if_shared=if_shared, timeout=timeout)
        assert caught.value.bytes == SIZE
        assert segment_of(tensor).state == segment_of(other).state == core.STATE_ACTIVE
    assert saver.pause("other", if_shared="refuse").allocations == 1
    drop_counter(sent)
    assert saver.pause("weights", if_shared="wait", timeout=60).possibly_shared_bytes == 0
    saver.resume()


def test_another_thread_sends_nothing_between_the_look_and_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = weights()
    drop_counter(share(tensor))
    pause, caught = _core.pause, []

    def send() -> None:
        with pytest.raises(errors.InvalidStateError, match="this memory is being paused") as info:
            share(tensor)
        caught.append(info.value)

    def send_and_pause(*arguments: Any, **named: Any) -> Any:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        return pause(*arguments, **named)

    monkeypatch.setattr(_core, "pause", send_and_pause)
    assert saver.pause("weights", if_shared="refuse").possibly_shared_bytes == 0
    assert len(caught) == 1 and shared_descriptors() == set()
    saver.resume("weights")
    drop_counter(share(tensor))


def test_a_message_of_before_the_pause_finds_no_memory(importer: Importer) -> None:
    tensor = weights()
    stale = message(tensor)
    saver.pause("weights")
    saver.resume("weights")
    fresh = message(tensor)
    assert importer.try_to("take", "stale", stale).startswith("error ")
    importer.take("fresh", fresh)
    assert importer.read("fresh") == contents(tensor)
    importer.drop("fresh")


def test_paused_memory_is_refused() -> None:
    tensor = weights()
    saver.pause("weights")
    ways: list[Callable[[], object]] = [
        lambda: ForkingPickler.dumps([{"key": (1, tensor[7:])}]),
        lambda: torch.multiprocessing.get_context("spawn").SimpleQueue().put(tensor),
        lambda: share(tensor),
    ]
    for way in ways:
        with pytest.raises(errors.InvalidStateError, match=r"this memory is paused.*after its resume.*") as caught:
            way()
        assert (caught.value.operation, caught.value.tag, caught.value.device) == ("share", "weights", 0)
    saver.resume("weights")


def test_the_receiver_of_a_queue_gets_an_error() -> None:
    (done,) = run_programs([Program("share.py", preload=STARTED_PRELOADED)])
    done.check()
    assert done.output == "ready\n"
    assert done.error.count("cannot be sent, and its get() will raise: share: ") == 2


def test_a_pause_ends_what_a_killed_importer_held() -> None:
    tensor = weights()
    kept = contents(tensor)
    with Importer() as doomed:
        doomed.take("it", message(tensor))
        doomed.kill()
        assert saver.pause("weights").possibly_shared_bytes == SIZE, "its counter never falls"
    saver.resume("weights")
    assert contents(tensor) == kept
    del tensor
    free = free_bytes()
    release_everything()
    assert_close_to(free_bytes() - free, SIZE, "freed")


def test_a_message_received_twice_counts_too_little(importer: Importer) -> None:
    tensor = weights()
    sent = message(tensor)
    importer.take("first", sent)
    assert importer.read("first") == contents(tensor)
    importer.drop("first")
    importer.take("second", sent)
    assert importer.read("second") == contents(tensor)
    assert saver.pause("weights").possibly_shared_bytes == 0, "documented: an estimate"
    saver.resume("weights")
    importer.drop("second")
