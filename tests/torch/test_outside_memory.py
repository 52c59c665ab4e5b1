"""Guards the report of memory that PyTorch takes outside of every region while one is open."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from core_regions import core_region
from other_threads import in_thread
from pooled_tensors import MIB, another_thread_inside, empty

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

pytestmark = pytest.mark.usefixtures("clean_device")

Reports = Callable[[str], list[str]]
SIZE = 20 * MIB
TAKEN, NOTHING = "no region manages", "managed nothing"


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Reports:
    """Return the messages with the words."""
    caplog.set_level(logging.INFO, logger="torch_memory_saver")
    return lambda words: [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], None]]:
    """Have another thread, which is in no region, allocate a tensor that stays until the end of the test."""
    tensors: list[torch.Tensor] = []
    yield lambda: in_thread(lambda: tensors.append(empty(SIZE)))
    tensors.clear()


def test_allocations_of_another_thread_are_reported_once_for_a_tag(
    tag: str, reports: Reports, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    for _ in range(4):
        with saver.region(tag):
            kept = empty(SIZE)
            elsewhere()
    (message,) = reports(TAKEN)
    assert message.startswith(f"while region(tag='{tag}') was open PyTorch took 20 MiB of GPU memory")
    assert "torch_memory_saver.bind_region(function)" in message
    assert "torch_memory_saver.manage(model)" in message
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in message
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    with saver.region(f"{tag}/b"):
        elsewhere()
    assert "HF_DEACTIVATE_ASYNC_LOAD=1" in reports(TAKEN)[1]
    assert len(reports(TAKEN)) == 2
    del kept


def test_later_regions_of_a_tag_are_looked_at_as_well(tag: str, reports: Reports, elsewhere: Callable[[], None]) -> None:
    for _ in range(3):
        with saver.region(tag):
            empty(SIZE)
    for _ in range(2):
        with saver.region(tag):  # the fourth, and one that is not looked at
            elsewhere()
        assert len(reports(TAKEN)) == 1


def test_managed_memory_is_not_reported(tag: str, reports: Reports) -> None:
    source = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    with saver.cuda_graph(torch.cuda.CUDAGraph(), tag=f"{tag}/first"):
        source + 1  # the first capture makes workspaces of cuBLAS, which stay
    with core_region("other library", _core.BACKUP_NONE, True):
        address = _core.allocate(SIZE, 0)
    with saver.region(tag):
        tensors = [empty(SIZE)]
        with saver.region(f"{tag}/b"):
            tensors.append(empty(SIZE))
        with another_thread_inside(f"{tag}/c") as theirs:
            pass
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag=f"{tag}/graph"):
            source + 1
        in_thread(lambda: empty(MIB))  # too little
        saver.pause(f"{tag}/b")
        saver.resume(f"{tag}/b")
    assert reports(TAKEN) == []
    with saver.region(f"{tag}/d"):
        tensors.append(empty(SIZE))
        _core.free(address)  # as a communication library frees its buffer in preload mode
    assert reports(TAKEN) == []
    tensors.clear()
    theirs.clear()


def test_ordinary_memory_that_is_meant_is_not_reported(tag: str, reports: Reports, elsewhere: Callable[[], None]) -> None:
    with saver.region(tag), saver.disable():
        empty(2 * SIZE)
    with pytest.raises(ZeroDivisionError), saver.region(f"{tag}/b"):
        elsewhere()
        raise ZeroDivisionError
    assert reports(TAKEN) == []


def test_a_region_in_which_nothing_is_allocated_is_information(
    tag: str, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with saver.region(tag):
        kept = empty(SIZE)
    with saver.region(tag):
        pass  # The earlier allocation still exists.
    assert reports(NOTHING) == []
    for _ in range(4):
        with saver.region(f"{tag}/empty"):
            pass
    (message,) = reports(NOTHING)
    assert f"region(tag='{tag}/empty')" in message
    assert {record.levelno for record in caplog.records if NOTHING in record.getMessage()} == {logging.INFO}
    del kept
