"""Guards that managed tensors can be sent to processes that have nothing but PyTorch: contents, generations, pauses while
importers have the memory mapped, blocks that are not used again too early, and descriptors that do not leak."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
from gpu_support import (
    GRANULARITY,
    MIB,
    PROGRAMS,
    STARTED_PRELOADED,
    Program,
    assert_close_to,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    hold_stream,
    open_files,
    release_everything,
    run_programs,
    saver,
    segment_of,
    torch,
)
from importers import Importer, contents, message
from sent_tensors import HANDLE, OFFSET, SIZE, drop_counter, share, shared_descriptors, weights

from torch_memory_saver._saver import native


@pytest.fixture(scope="module")
def importer() -> Iterator[Importer]:
    with Importer() as process:
        yield process


# ---- contents ----


def test_an_importer_reads_and_writes_the_tensor(importer: Importer) -> None:
    tensor = weights()
    assert importer.take("it", message(tensor)) == f"torch.uint8 ({SIZE},) (1,) Tensor"
    assert importer.read("it") == contents(tensor)
    importer.fill("it", 9)
    assert int(tensor.min()) == int(tensor.max()) == 9
    fill_random(tensor, 2)
    torch.cuda.synchronize()
    assert importer.read("it") == contents(tensor)
    importer.drop("it")


def test_views_types_and_parameters_arrive(importer: Importer) -> None:
    matrix = weights(2 * MIB).view(torch.float16).view(1024, 1024)
    matrix.normal_()
    torch.cuda.synchronize()
    cases: dict[str, tuple[torch.Tensor, str]] = {
        "row": (matrix[7:9], "torch.float16 (2, 1024) (1024, 1) Tensor"),
        "column": (matrix[:, 3], "torch.float16 (1024,) (1024,) Tensor"),
        "transposed": (matrix.t(), "torch.float16 (1024, 1024) (1, 1024) Tensor"),
        "parameter": (torch.nn.Parameter(matrix, requires_grad=False), "torch.float16 (1024, 1024) (1024, 1) Parameter"),
    }
    for name, (tensor, described) in cases.items():
        assert importer.take(name, message(tensor)) == described
        assert importer.read(name) == contents(tensor), name
    for name in cases:
        importer.drop(name)


def test_tensors_of_one_allocation_are_described_alike(importer: Importer) -> None:
    with saver.region(tag="small"):
        tensors = [torch.full((300,), value, device="cuda") for value in range(4)]
    torch.cuda.synchronize()
    assert len({segment_of(tensor).address for tensor in tensors}) == 1
    sent = [share(tensor) for tensor in tensors]
    assert len({fields[HANDLE] for fields in sent}) == 1
    assert [fields[OFFSET] for fields in sent] == [each.data_ptr() - segment_of(each).address for each in tensors]
    sent.append(share(tensors[0]))
    assert sent[-1] != sent[0] and sent[-1][HANDLE] == sent[0][HANDLE], "the same in one generation"
    for name, tensor in enumerate(tensors):
        importer.take(f"small{name}", message(tensor))
    for name, tensor in enumerate(tensors):
        assert importer.read(f"small{name}") == contents(tensor)
        importer.drop(f"small{name}")
    for fields in sent:
        drop_counter(fields)


def test_an_importer_waits_for_the_senders_stream(importer: Importer) -> None:
    """All sends of a stream have one event, and the importer opens it each time."""
    tensors = {"one": weights(), "two": weights(seed=2)}
    drop_counter(share(tensors["one"]))  # with the test of the format, which waits for the stream
    for round in range(3):
        with torch.cuda.stream(torch.cuda.Stream() if round == 2 else torch.cuda.current_stream()):
            sent = {}
            for name, tensor in tensors.items():
                hold_stream()
                tensor.fill_(round)
                sent[name] = message(tensor)
        assert importer.is_waiting() == "False"
        for name in sent:
            importer.take(name, sent[name])
            assert importer.is_waiting() == "True", (round, name)
        torch.cuda.synchronize()
        for name in sent:
            assert importer.read(name) == contents(tensors[name])
            importer.drop(name)


def test_a_tensor_is_shared_inside_a_region(importer: Importer) -> None:
    tensor = weights()
    before = saver.stats().total
    with saver.region(tag="other"):
        sent = message(tensor)
    assert saver.stats().total == before, "what goes with the tensor is ordinary memory"
    importer.take("inside", sent)
    assert importer.read("inside") == contents(tensor)
    importer.drop("inside")


def test_other_tensors_are_shared_as_before() -> None:
    with saver.region(tag="weights"):
        managed = empty(2 * MIB)
        with saver.disable():
            copy = managed.clone()
    handle = share(copy)
    assert (handle[0], handle[2]) == (0, 2 * MIB)
    drop_counter(handle)
    torch.cuda.ipc_collect()
    assert ForkingPickler.dumps(copy.cpu())
    assert ForkingPickler.dumps(torch.nn.Parameter(copy.cpu(), requires_grad=False))


# ---- pauses ----


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


def test_a_pause_without_importers_reports_none() -> None:
    tensor = weights()
    drop_counter(share(tensor))
    free = free_bytes()
    report = saver.pause("weights", if_shared="refuse")
    assert (report.bytes, report.possibly_shared_bytes) == (SIZE, 0)
    assert_close_to(free_bytes() - free, SIZE, "freed")
    saver.resume("weights")


def test_a_pause_may_refuse_or_wait_for_importers() -> None:
    tensor, other = weights(), weights(2 * MIB, tag="other")
    sent = share(tensor)
    for if_shared, timeout in (("refuse", None), ("wait", 0.05)):
        with pytest.raises(errors.InvalidStateError, match=f"other processes may still use {SIZE} bytes") as caught:
            saver.pause(if_shared=if_shared, timeout=timeout)
        assert caught.value.bytes == SIZE
        assert segment_of(tensor).state == segment_of(other).state == core.STATE_ACTIVE
    assert saver.pause("other", if_shared="refuse").allocations == 1
    drop_counter(sent)
    assert saver.pause("weights", if_shared="wait", timeout=60).possibly_shared_bytes == 0
    saver.resume()


@pytest.mark.parametrize(("if_shared", "timeout"), [("refuse", None), ("wait", 60)])
def test_another_thread_sends_nothing_between_the_look_and_the_pause(
    monkeypatch: pytest.MonkeyPatch, if_shared: str, timeout: float | None
) -> None:
    tensor = weights()
    drop_counter(share(tensor))
    pause, caught = native.pause, []

    def send() -> None:
        with pytest.raises(errors.InvalidStateError, match="this memory is being paused") as info:
            share(tensor)
        caught.append(info.value)

    def send_and_pause(*arguments: object) -> object:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        return pause(*arguments)

    monkeypatch.setattr(native, "pause", send_and_pause)
    assert saver.pause("weights", if_shared=if_shared, timeout=timeout).possibly_shared_bytes == 0
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


@pytest.mark.outer
def test_where_everything_is_managed() -> None:
    environment = (("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1"))
    (done,) = run_programs([Program("share_everything.py", environment=environment, preload=True)])
    assert done.check().output == "shared\n"


# ---- blocks ----


def test_a_block_is_not_used_again_while_an_importer_reads_it(importer: Importer) -> None:
    with saver.region(tag="block"):
        tensor, neighbour = empty(MIB), empty(MIB)  # which keeps the allocation
    tensor.fill_(5)
    torch.cuda.synchronize()
    before, address = contents(tensor), tensor.data_ptr()
    importer.take("block", message(tensor))
    del tensor
    with saver.region(tag="block"):
        others = [empty(MIB).fill_(6) for _ in range(4)]
    torch.cuda.synchronize()
    assert address not in {other.data_ptr() for other in others}
    assert importer.read("block") == before
    importer.drop("block")
    torch.cuda.ipc_collect()
    with saver.region(tag="block"):
        again = [empty(MIB) for _ in range(4)]
    assert address in {other.data_ptr() for other in again}
    del neighbour


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


# ---- processes and descriptors ----


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_an_importer_outlives_its_sender(importer: Importer, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "exporter.py"), "11"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        importer.take("orphan", sender.stdout.readline().strip())
        if end == "kill":
            sender.kill()
        else:
            sender.stdin.close()
        sender.wait(timeout=60)
    data = bytes([11]) * (4 * MIB)
    assert importer.read("orphan") == f"{len(data)} {zlib.crc32(data)}"
    importer.drop("orphan")


def test_ten_thousand_shares_leave_no_descriptor() -> None:
    tensors = [weights(SIZE // 4, seed=seed) for seed in range(4)]
    assert len({segment_of(tensor).address for tensor in tensors}) == 4
    drop_counter(share(tensors[0]))  # with the test of the format, the event and the first file of counters
    assert len(shared_descriptors()) == 1
    files = open_files()
    for round in range(10_000):
        drop_counter(share(tensors[round % 4]))
    assert len(shared_descriptors()) == 4, "one for each piece of memory"
    torch.cuda.ipc_collect()
    of_three_pieces = 2 * 3  # ours, and on the simulated GPU one of its driver
    assert open_files() <= files + of_three_pieces
    for _ in range(3):
        saver.pause("weights")
        assert shared_descriptors() == set()
        saver.resume("weights")
        for tensor in tensors:
            drop_counter(share(tensor))
        assert len(shared_descriptors()) == 4


def test_a_forked_child_has_no_descriptor() -> None:
    tensor = weights(GRANULARITY)
    drop_counter(share(tensor))
    descriptor = core.export_memory(tensor.data_ptr()).descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}")
    child = os.fork()
    if child == 0:
        os._exit(1 if os.path.lexists(f"/proc/self/fd/{descriptor}") else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.lexists(f"/proc/self/fd/{descriptor}")


# ---- options ----


def test_sharing_during_a_capture_is_refused() -> None:
    tensor = weights(GRANULARITY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(errors.CaptureInProgressError, match="before or after the capture"):
        share(tensor)
    assert segment_of(tensor).state == core.STATE_ACTIVE


#: Interpreters of environments with other releases of PyTorch, separated as in PATH: see `make torch-matrix`.
OTHER_PYTHONS = [path for path in os.environ.get("IMPORTER_PYTHONS", "").split(os.pathsep) if path]


@pytest.mark.parametrize(
    "python",
    OTHER_PYTHONS or [pytest.param("", id="none", marks=pytest.mark.skip("IMPORTER_PYTHONS names no environments"))],
)
def test_importers_of_other_releases(python: str) -> None:
    tensor = weights(GRANULARITY)
    with Importer(python) as other:
        saver.share_for = other.release
        try:
            other.take("it", message(tensor))
            saver.pause("weights")
            saver.resume("weights")
            other.take("again", message(tensor))
        finally:
            saver.share_for = None
        assert other.read("it") == other.read("again") == contents(tensor)
        other.fill("again", 7)
        assert int(tensor.min()) == int(tensor.max()) == 7
        other.drop("it")
        other.drop("again")
    assert saver.pause("weights").possibly_shared_bytes == 0
    saver.resume("weights")


def test_the_importers_release_chooses_the_format() -> None:
    tensor = weights(GRANULARITY)
    versions = {}
    for release in ("2.6", "2.11.0+cu130", "2.13", "2.15.0a0", None):
        saver.share_for = release
        fields = share(tensor)
        drop_counter(fields)
        handle = fields[HANDLE]
        assert isinstance(handle, bytes)
        versions[release] = handle[0]
    own = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert versions == {"2.6": 1, "2.11.0+cu130": 1, "2.13": 3, "2.15.0a0": 3, None: 3 if own >= (2, 13) else 1}
    for wrong in ("2.5", "two", "2", 2.11):
        with pytest.raises(errors.InvalidArgumentError, match="share_for"):
            saver.share_for = wrong
    assert saver.share_for is None
