"""Guards hooks with PyTorch: a registration that a pause would break is undone and made again, a graph is torn down and
captured again, memory that was sent is taken back, NCCL; with failures on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, core, empty, errors, saver, state_of, take_all_but, torch, write_and_check
from sent_tensors import drop_counter, share

HANDLES: list[Any] = []


@pytest.fixture(autouse=True)
def remove_hooks() -> Iterator[None]:
    yield
    while HANDLES:
        HANDLES.pop().remove()


def on_pause(*arguments: Any, **options: Any) -> None:
    HANDLES.append(saver.on_pause(*arguments, **options))


def on_resume(*arguments: Any, **options: Any) -> None:
    HANDLES.append(saver.on_resume(*arguments, **options))


def in_region(tag: str, size: int = 4 * MIB, **settings: Any) -> torch.Tensor:
    with saver.region(tag=tag, **settings):
        return empty(size)


class Registration:
    """What RDMA does: it holds the physical memory of a buffer, named here by its generation, for remote accesses."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.held: int | None = None
        self.register()

    def register(self, *_: object) -> None:
        assert self.held is None, "registered twice"
        self.held = core.export_memory(self.address).generation

    def deregister(self, *_: object) -> None:
        assert self.held is not None, "deregistered twice"
        self.held = None

    def check(self) -> None:
        assert self.held == core.export_memory(self.address).generation, "remote accesses would hit other memory"


def test_a_registration_follows_the_physical_memory() -> None:
    tensor = in_region("kv")
    registration = Registration(tensor)
    first = registration.held
    on_pause("kv", "before", registration.deregister, cancelled=registration.register)
    on_resume("kv", "after", registration.register)
    for _ in range(2):
        saver.pause("kv")
        assert registration.held is None
        saver.pause("kv")
        saver.resume("kv")
        saver.resume("kv")
        registration.check()
        write_and_check(tensor, 3)
    saver.pause("kv")
    saver.resume("kv", wait=False).wait()
    registration.check()
    assert registration.held != first, "the memory is another, so that without the hook the registration is wrong"


def test_a_registration_survives_failures() -> None:
    """Of another callback, and of a pause during a capture, which calls no hook."""
    tensor = in_region("kv")
    registration = Registration(tensor)
    on_pause("kv", "before", registration.deregister, cancelled=registration.register)
    on_resume("kv", "after", registration.register)
    fails = [True]

    def fail(call: Any) -> None:
        if fails[0]:
            raise KeyError("no")

    on_pause(None, "before", fail)
    with pytest.raises(KeyError):
        saver.pause()
    registration.check()
    assert state_of(tensor) == core.STATE_ACTIVE
    fails[0] = False
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        tensor.add_(1)
        with pytest.raises(errors.CaptureInProgressError):
            saver.pause("kv")
    registration.check()
    saver.pause("kv")
    saver.resume("kv")
    registration.check()
    del graph


def test_what_a_hook_is_told_and_what_the_report_has() -> None:
    tensors = [in_region("a", 8 * MIB, enable_cpu_backup=True), in_region("b")]
    told: list[Any] = []
    on_pause(["a", "b"], "before", told.append)
    on_pause(["a", "b"], "after", told.append)
    report = saver.pause("a")
    before, after = told
    assert (before.operation, before.tags, before.devices, before.report) == ("pause", ("a",), (0,), None)
    assert before.bytes == after.bytes == report.bytes > 0
    assert before.allocations == report.allocations
    assert after.report == report
    saver.resume("a")
    del tensors


def test_memory_that_a_callback_frees_goes_back_with_the_pause() -> None:
    """Tensors that a callback drops lie in segments that the pause then releases, before it lists what to keep."""
    held = [in_region("w", 32 * MIB), in_region("w", 32 * MIB)]  # too large to share a segment
    on_pause("w", "before", lambda call: held.pop())
    counted: list[int] = []
    on_pause("w", "after", lambda call: counted.append(call.allocations - call.report.allocations))
    saver.pause("w")
    assert counted == [1]
    assert all(row.state == core.STATE_PAUSED for row in core.segments())
    saver.resume("w")
    write_and_check(held[0], 5)


def test_a_callback_may_allocate_in_regions_and_outside() -> None:
    weights = in_region("w")
    made: list[torch.Tensor] = []

    def allocate(call: Any) -> None:
        made.append(empty(MIB))
        made.append(in_region(f"by {call.operation}"))
        made.append(in_region("w"))

    on_pause("w", "after", allocate)
    saver.pause("w")
    assert state_of(weights) == core.STATE_PAUSED
    for number, tensor in enumerate(made):
        write_and_check(tensor, number)
    saver.resume("w")
    write_and_check(weights, 9)


def test_pause_and_resume_are_refused_inside() -> None:
    in_region_tensor = in_region("w")
    refused: list[str] = []

    def call_again(call: Any) -> None:
        for function in (saver.pause, saver.resume, lambda: saver.resume(wait=False)):
            with pytest.raises(errors.InvalidStateError, match="inside pause") as caught:
                function()
            refused.append(caught.value.operation)

    on_pause(None, "before", call_again)
    on_pause(None, "after", call_again)
    saver.pause("w")
    assert refused == ["pause", "resume", "resume"] * 2
    assert state_of(in_region_tensor) == core.STATE_PAUSED
    saver.resume("w")


class Decoder:
    """A step that is captured, and captured again after each resume, because its graph is torn down at the pause."""

    def __init__(self) -> None:
        self.weights = in_region("weights", enable_cpu_backup=True)
        self.weights.fill_(2)
        self.source = torch.ones_like(self.weights)
        self.graph: Any = None
        self.captures = 0
        self.capture()

    def capture(self, *_: object) -> None:
        assert self.graph is None
        self.graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(self.graph, tag="graph"):
            self.result = self.weights * self.source
        self.captures += 1

    def tear_down(self, *_: object) -> None:
        self.graph = self.result = None

    def check(self) -> None:
        self.graph.replay()
        assert bool((self.result == 2).all())


def test_a_graph_is_torn_down_and_captured_again() -> None:
    """Its pool goes back to the driver instead of being paused."""
    decoder = Decoder()
    decoder.check()
    on_pause("weights", "before", decoder.tear_down, cancelled=decoder.capture)
    on_resume("weights", "after", decoder.capture)
    saver.pause("weights")
    saver.empty_cache()
    assert not [row for row in core.segments() if row.tag == "graph"], "the graph's memory is gone"
    saver.resume("weights")
    decoder.check()
    assert decoder.captures == 2

    def fail(call: Any) -> None:
        raise KeyError("no")

    on_pause("weights", "before", fail)
    with pytest.raises(KeyError):
        saver.pause("weights")
    decoder.check()
    assert decoder.captures == 3, "captured again by cancelled"
    decoder.tear_down()


def test_a_callback_takes_back_what_was_sent() -> None:
    """pause(if_shared="refuse") looks after the before-callbacks."""
    tensor = in_region("w")
    sent = [share(tensor)]
    with pytest.raises(errors.InvalidStateError, match="other processes may still use"):
        saver.pause("w", if_shared="refuse")
    on_pause("w", "before", lambda call: drop_counter(sent.pop()))
    assert saver.pause("w", if_shared="refuse").possibly_shared_bytes == 0
    assert not sent
    saver.resume("w")


def test_a_failed_resume_cancels_and_can_be_repeated() -> None:
    tensor = in_region("w", 16 * MIB, enable_cpu_backup=True)
    tensor.fill_(7)
    registration = Registration(tensor)
    events: list[str] = []
    on_pause("w", "before", registration.deregister)
    on_resume("w", "after", registration.register)
    on_resume(
        "w", "before", lambda call: events.append("before"), cancelled=lambda error: events.append(type(error).__name__)
    )
    saver.pause("w")
    other = take_all_but(8 * MIB)
    with pytest.raises(errors.OutOfMemoryError):
        saver.resume("w")
    del other
    torch.cuda.empty_cache()
    assert events == ["before", "OutOfMemoryError"]
    assert registration.held is None
    saver.resume("w")
    registration.check()
    assert events == ["before", "OutOfMemoryError", "before"]
    assert bool((tensor == 7).all())


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_nccl(preload: bool) -> None:
    """PyTorch before 2.12 cannot suspend: one sentence says what stays, and everything works as before."""
    (done,) = run_programs([Program("nccl_hook.py", preload=preload)])
    assert done.status == 0, done.error
    said = json.loads(done.output.splitlines()[-1])
    assert said["lazily"] is None, "no group has a communicator yet"
    assert said["after"] == []
    if said["can"]:
        assert said["stays"] is None
        assert said["suspended"] == [["0", "2"], ["0", "2"]]
        return
    assert said["suspended"] == [[], []]
    assert said["stays"] == (
        "The NCCL communicators of process groups '0', '2' keep their device memory during a pause: PyTorch "
        f"{said['version']} has no suspend() of a process group's backend, which PyTorch 2.12 has."
    )
    assert done.error.count(said["stays"]) == 1, "logged once"
