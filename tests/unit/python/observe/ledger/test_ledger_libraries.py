"""Guards the lines of libraries in the ledger: who allocated what, under which names, and what is said of the rest."""

from __future__ import annotations

import pytest
from fake_torch import FakeTorch
from ledger_sources import MIB

from torch_memory_saver import TorchMemorySaver, _core
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.observe._ledger import sources as taking

pytestmark = pytest.mark.usefixtures("fake_torch", "nvml", "memory")


@pytest.fixture
def libraries(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> list[_core.Library]:
    """What the preload library has counted of other libraries: the test fills it."""
    saver.stats()
    rows: list[_core.Library] = []
    monkeypatch.setattr(_core, "preloaded", True)
    monkeypatch.setattr(_core, "libraries", lambda: rows)
    return rows


def test_libraries_are_lines_in_preload_mode(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, libraries: list[_core.Library]
) -> None:
    libraries += [
        _core.Library(("/usr/lib/libnccl.so.2", 0, 3 * MIB, 4)),
        _core.Library(("/a/libsame.so", 0, 5 * MIB, 1)),
        _core.Library(("/b/libsame.so", 0, 6 * MIB, 1)),
        _core.Library(("", 0, 1 * MIB, 1)),
        _core.Library(("/torch/lib/libc10_cuda.so", 0, 30 * MIB, 2)),
        _core.Library(("/usr/lib/libnccl.so.2", 1, 7 * MIB, 1)),
        _core.Library(("/x/liblost.so", -1, 9, 2)),
    ]
    fake_torch.allocate(30 * MIB)
    ledger = saver.ledger()
    lines = ledger[0].of("library")
    assert [(line.name, line.bytes, line.allocations) for line in lines] == [
        ("/b/libsame.so", 6 * MIB, 1),
        ("/a/libsame.so", 5 * MIB, 1),
        ("NCCL", 3 * MIB, 4),
        ("code made at run time", 1 * MIB, 1),
    ]
    assert sum(line.bytes or 0 for line in ledger[0].lines) == 100 * MIB
    assert ledger[0].of("processes")[0].bytes == (100 - 30 - 15) * MIB
    assert ledger.remarks == ("liblost.so holds 9 bytes in 2 allocations on a device that is not known.",)
    monkeypatch.setattr(layer, "_torch_cuda", None)  # no other source knows what PyTorch holds
    assert saver.ledger()[0].of("library")[0].name == "libc10_cuda.so"
    libraries.clear()
    (line,) = saver.ledger()[0].of("library")
    assert (line.name, line.bytes, line.allocations) == ("other libraries", 0, 0)


def test_files_of_one_library_are_one_line(saver: TorchMemorySaver, libraries: list[_core.Library]) -> None:
    libraries += [
        _core.Library(("/nvidia/lib/libcublas.so.13", 0, 1 * MIB, 1)),
        _core.Library(("/nvidia/lib/libcublasLt.so.13", 0, 2 * MIB, 3)),
        _core.Library(("/nvidia/lib/libcudnn_graph.so.9", 0, 4 * MIB, 1)),
        _core.Library(("/one/libnccl.so.2.28.9", 0, 8 * MIB, 1)),
        _core.Library(("/two/libnccl.so", 0, 16 * MIB, 1)),
        _core.Library(("/a/libcudart-d0da41ae.so.11.0", 0, 5 * MIB, 1)),
        _core.Library(("/a/libncclx.so", 0, 6 * MIB, 1)),
    ]
    assert [(line.name, line.bytes, line.allocations) for line in saver.ledger()[0].of("library")] == [
        ("NCCL", 24 * MIB, 2),
        ("libncclx.so", 6 * MIB, 1),
        ("CUDA runtime", 5 * MIB, 1),
        ("cuDNN", 4 * MIB, 1),
        ("cuBLAS", 3 * MIB, 4),
    ]


def test_a_note_says_what_is_not_counted(saver: TorchMemorySaver, libraries: list[_core.Library]) -> None:
    (line,) = saver.ledger()[0].of("library")
    assert "as NCCL and cuBLAS do, are not counted" in line.note
    libraries += [_core.Library(("/a/liba.so", 0, 2 * MIB, 1)), _core.Library(("/a/libb.so", 0, 1 * MIB, 1))]
    first, last = saver.ledger()[0].of("library")
    assert (first.note, last.note) == ("", line.note)


def test_what_could_not_be_counted_is_a_remark(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = _core.counters() | {"uncounted_allocations_total": 3}
    monkeypatch.setattr(_core, "counters", lambda: counters)
    assert saver.ledger().remarks == ("3 allocations of libraries could not be counted, because host memory was short.",)


def test_what_nccl_keeps_is_a_remark(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking.nccl_communicators, "describe_unreleased", lambda: "The NCCL communicator keeps its memory.")
    ledger = saver.ledger()
    assert ledger.remarks == ("The NCCL communicator keeps its memory.",)
    assert str(ledger).splitlines()[-1] == "The NCCL communicator keeps its memory."
