"""Guards that managed tensors can be sent to processes that have nothing but PyTorch, of this release or another: their
contents, the stream that they wait for, and the format."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler

import pytest
from gpu_programs import Program, run_programs
from gpu_support import GRANULARITY, MIB, core, empty, errors, hold_stream, saver, segment_of, torch
from importers import Importer, contents, message
from sent_tensors import HANDLE, OFFSET, drop_counter, share, weights


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


@pytest.mark.outer
def test_where_everything_is_managed() -> None:
    environment = (("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1"))
    (done,) = run_programs([Program("share_everything.py", environment=environment, preload=True)])
    assert done.check().output == "shared\n"


@pytest.mark.outer
@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver"])
def test_workers_that_never_import_the_package_send_tensors(how: str) -> None:
    (done,) = run_programs([Program("send_unaware.py", (how,), (("TMS_INIT_ENABLE", "1"),), preload=True)])
    assert (done.check().output, done.error) == ("sent\n", "")


def test_sharing_during_a_capture_is_refused() -> None:
    tensor = weights(GRANULARITY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(errors.CaptureInProgressError, match="before or after the capture"):
        share(tensor)
    assert segment_of(tensor).state == core.STATE_ACTIVE


# ---- other releases ----


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
