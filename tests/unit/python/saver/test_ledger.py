"""Guards the ledger: its lines add up to what the driver says, whatever the sources say, and it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_torch import FakeTorch

import torch_memory_saver as module
from torch_memory_saver import TorchMemorySaver, _core, errors
from torch_memory_saver._saver import ledger as taking
from torch_memory_saver._saver import preload
from torch_memory_saver._saver.ledger_context import measure_context_bytes
from torch_memory_saver._torch import layer
from torch_memory_saver.holders import DeviceLedger, LedgerPart
from torch_memory_saver.memory.nvml import DeviceProcess, NvmlHiddenError

MIB = 1 << 20
HOLDERS = ["managed", "torch", "library", "context", "processes", "unattributed"]


class FakeNvml:
    """What NVML says of each device; a text hides it."""

    def __init__(self) -> None:
        self.says: list[DeviceProcess] | str = "NVML: Driver Not Loaded"
        self.asked: list[str] = []

    def processes(self, uuid: str) -> list[DeviceProcess]:
        self.asked.append(uuid)
        if isinstance(self.says, str):
            raise NvmlHiddenError(self.says)
        return self.says


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(taking, "_nvml", lambda: nvml)
    monkeypatch.setattr(_core, "device_info", lambda device: _core.DeviceInfo((f"GPU-{device}", 1024 * MIB)))
    return nvml


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The used bytes of each device, as the driver says, of 1024 MiB."""
    used = {0: 100 * MIB, 1: 7 * MIB}
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((1024 * MIB - used[device], 1024 * MIB)))
    return used


def sizes(ledger: DeviceLedger) -> dict[str, int | None]:
    assert sum(line.bytes or 0 for line in ledger.lines) == ledger.used_bytes
    assert [line.holder for line in ledger.lines] == HOLDERS
    return {line.holder: line.bytes for line in ledger.lines}


def allocate(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """12 MiB that are managed, of two tags, and 40 MiB of PyTorch's, of which 30 are cached."""
    for tag, size in (("a", 4 * MIB), ("b", 8 * MIB)):
        with saver.region(tag):
            fake_torch.allocate(size)
    fake_torch.allocate(10 * MIB)
    fake_torch.free(fake_torch.allocate(30 * MIB))


def test_every_source_tells(saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]) -> None:
    allocate(saver, fake_torch)
    nvml.says = [DeviceProcess(1, 20 * MIB), DeviceProcess(os.getpid(), 57 * MIB), DeviceProcess(2, 21 * MIB)]
    ledger = saver.ledger()[0]
    assert sizes(ledger) == {
        "managed": 12 * MIB,
        "torch": 40 * MIB,
        "library": None,
        "context": 5 * MIB,
        "processes": 41 * MIB,
        "unattributed": 2 * MIB,
    }
    managed, torch, library, _, processes, _ = ledger.lines
    assert managed.parts == (LedgerPart("a", 4 * MIB, 1), LedgerPart("b", 8 * MIB, 1))
    assert torch.parts == (LedgerPart("in use", 10 * MIB), LedgerPart("cached", 30 * MIB))
    assert (managed.allocations, torch.allocations) == (2, 2)
    assert "preload library is not loaded" in library.note
    assert processes.parts == (LedgerPart("pid 1", 20 * MIB), LedgerPart("pid 2", 21 * MIB))
    assert nvml.asked == ["GPU-0"]
    assert (ledger.total_bytes, ledger.free_bytes) == (1024 * MIB, 924 * MIB)
    assert ledger.largest == processes


def test_a_pause_moves_memory_to_what_is_free(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]
) -> None:
    allocate(saver, fake_torch)
    saver.pause("b")
    ledger = saver.ledger()[0]
    assert (sizes(ledger)["managed"], sizes(ledger)["torch"]) == (4 * MIB, 40 * MIB)
    assert ledger.lines[0].parts == (LedgerPart("a", 4 * MIB, 1),)


def test_nvml_is_hidden(saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]) -> None:
    allocate(saver, fake_torch)
    ledger = saver.ledger()[0]
    assert sizes(ledger) == {
        "managed": 12 * MIB,
        "torch": 40 * MIB,
        "library": None,
        "context": None,
        "processes": 48 * MIB,
        "unattributed": 0,
    }
    (merged,) = ledger.of("processes")
    assert merged.name == "other processes, context and modules"
    assert merged.note == "NVML does not tell them apart: NVML: Driver Not Loaded"


@pytest.mark.parametrize("rows", [[], [DeviceProcess(1, 90 * MIB)], [DeviceProcess(os.getpid(), 51 * MIB)]])
def test_nvml_does_not_list_this_process(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    rows: list[DeviceProcess],
) -> None:
    allocate(saver, fake_torch)
    nvml.says = rows
    ledger = saver.ledger()[0]
    assert sizes(ledger)["processes"] == 48 * MIB and sizes(ledger)["context"] is None
    assert "--pid=host" in ledger.of("processes")[0].note


def test_sources_that_disagree_are_shown(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]
) -> None:
    allocate(saver, fake_torch)
    memory[0] = 50 * MIB  # less than managed memory and PyTorch's
    assert sizes(saver.ledger()[0])["unattributed"] == -2 * MIB
    nvml.says = [DeviceProcess(os.getpid(), 60 * MIB), DeviceProcess(3, 40 * MIB)]
    ledger = saver.ledger()[0]
    assert sizes(ledger)["unattributed"] == -50 * MIB
    assert "disagree" in ledger.lines[-1].note
    assert "-50.0" in str(saver.ledger())


def test_processes_whose_memory_is_hidden(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]
) -> None:
    nvml.says = [DeviceProcess(os.getpid(), 0), DeviceProcess(3, None)]
    ledger = saver.ledger()[0]
    assert sizes(ledger) | {"library": 0} == dict.fromkeys(HOLDERS, 0) | {"unattributed": 100 * MIB}
    (processes,) = ledger.of("processes")
    assert (processes.parts, processes.note) == ((LedgerPart("pid 3", None),), "NVML hides the memory of some")


def test_without_torch(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver.stats()
    monkeypatch.setattr(layer, "_torch_cuda", None)
    ledger = saver.ledger()[0]
    assert (sizes(ledger)["torch"], ledger.of("torch")[0].note) == (None, "PyTorch is not in use")


def test_an_allocator_of_torch_that_has_no_segments(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Any:
        raise errors.InvalidStateError("cudaMallocAsync has no memory pools")

    monkeypatch.setattr(layer, "in_use", refuse)
    (torch,) = saver.ledger()[0].of("torch")
    assert torch.bytes is None and "cudaMallocAsync has no memory pools" in torch.note


def test_devices(saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]) -> None:
    fake_torch.devices, fake_torch.active_devices = 2, 0b11
    fake_torch.allocate(3 * MIB, 1)
    ledger = saver.ledger()
    assert [device.device for device in ledger] == [0, 1]
    assert [sizes(device)["torch"] for device in ledger] == [0, 3 * MIB]
    assert [device.device for device in saver.ledger(1)] == [1]
    with pytest.raises(KeyError):
        saver.ledger(1)[0]
    fake_torch.active_devices = 0b01
    assert len(saver.ledger()) == 1
    with pytest.raises(errors.InvalidStateError, match="does not use device 1"):
        saver.ledger(1)
    fake_torch.active_devices = 0
    assert str(saver.ledger()) == "no device is in use by this process"


def test_it_is_json_and_a_table(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]
) -> None:
    allocate(saver, fake_torch)
    ledger = saver.ledger()
    plain = json.loads(json.dumps(ledger.as_dict()))
    assert (plain["format"], plain["pid"], plain["remarks"]) == (1, os.getpid(), [])
    (device,) = plain["devices"]
    assert (device["device"], device["total_bytes"], device["used_bytes"]) == (0, 1024 * MIB, 100 * MIB)
    assert [line["holder"] for line in device["lines"]] == HOLDERS
    assert device["lines"][0]["parts"][0] == {"name": "a", "bytes": 4 * MIB, "allocations": 1}
    lines = str(ledger).splitlines()
    assert len({len(line) for line in lines[:5] if line[-1].isdigit()}) == 1  # numbers end in one column
    assert [" ".join(line.split()) for line in lines[:8]] == [
        "device 0 MiB allocations",
        "managed, resident 12.0 2",
        "a 4.0 1",
        "b 8.0 1",
        "PyTorch, not managed 40.0 2",
        "in use 10.0",
        "cached 30.0",
        "other libraries (1) -",
    ]
    assert any(line.startswith("(1) not counted") for line in lines)
    assert max(map(len, lines)) <= 80


def test_libraries_are_lines_in_preload_mode(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver.stats()
    rows = [
        _core.Library(("/usr/lib/libnccl.so.2", 0, 3 * MIB, 4)),
        _core.Library(("/a/libsame.so", 0, 5 * MIB, 1)),
        _core.Library(("/b/libsame.so", 0, 6 * MIB, 1)),
        _core.Library(("", 0, 1 * MIB, 1)),
        _core.Library(("/torch/lib/libc10_cuda.so", 0, 30 * MIB, 2)),
        _core.Library(("/usr/lib/libnccl.so.2", 1, 7 * MIB, 1)),
        _core.Library(("/x/liblost.so", -1, 9, 2)),
    ]
    monkeypatch.setattr(_core, "preloaded", True)
    monkeypatch.setattr(_core, "libraries", lambda: rows)
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
    monkeypatch.setattr(layer, "_torch_cuda", None)  # nobody else tells what PyTorch has
    assert saver.ledger()[0].of("library")[0].name == "libc10_cuda.so"
    rows.clear()
    (line,) = saver.ledger()[0].of("library")
    assert (line.name, line.bytes, line.allocations) == ("other libraries", 0, 0)


def test_files_of_one_library_are_one_line(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver.stats()
    rows = [
        _core.Library(("/nvidia/lib/libcublas.so.13", 0, 1 * MIB, 1)),
        _core.Library(("/nvidia/lib/libcublasLt.so.13", 0, 2 * MIB, 3)),
        _core.Library(("/nvidia/lib/libcudnn_graph.so.9", 0, 4 * MIB, 1)),
        _core.Library(("/one/libnccl.so.2.28.9", 0, 8 * MIB, 1)),
        _core.Library(("/two/libnccl.so", 0, 16 * MIB, 1)),
        _core.Library(("/a/libcudart-d0da41ae.so.11.0", 0, 5 * MIB, 1)),
        _core.Library(("/a/libncclx.so", 0, 6 * MIB, 1)),
    ]
    monkeypatch.setattr(_core, "preloaded", True)
    monkeypatch.setattr(_core, "libraries", lambda: rows)
    assert [(line.name, line.bytes, line.allocations) for line in saver.ledger()[0].of("library")] == [
        ("NCCL", 24 * MIB, 2),
        ("libncclx.so", 6 * MIB, 1),
        ("CUDA runtime", 5 * MIB, 1),
        ("cuDNN", 4 * MIB, 1),
        ("cuBLAS", 3 * MIB, 4),
    ]


@pytest.mark.parametrize(
    ("library", "switched_on", "words"),
    [
        ("ledger", True, "are counted as well (TMS_LEDGER=1)"),
        ("ledger", False, "are counted only with TMS_LEDGER=1"),
        ("plain", False, "are counted only with TMS_LEDGER=1"),
        ("plain", True, "TMS_LEDGER=1 has no effect"),
    ],
)
def test_a_note_says_whether_lookups_are_counted(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    switched_on: bool,
    words: str,
) -> None:
    saver.stats()
    path = preload.ledger_library_path() if library == "ledger" else preload.library_path()
    monkeypatch.setattr(_core, "preloaded", True)
    monkeypatch.setattr(_core, "library_path", str(path))
    monkeypatch.setattr(_core, "get_ledger", lambda: switched_on)
    rows: list[_core.Library] = []
    monkeypatch.setattr(_core, "libraries", lambda: rows)
    (line,) = saver.ledger()[0].of("library")
    assert words in line.note
    rows += [_core.Library(("/a/liba.so", 0, 2 * MIB, 1)), _core.Library(("/a/libb.so", 0, 1 * MIB, 1))]
    first, last = saver.ledger()[0].of("library")
    assert first.note == "" and words in last.note


def test_what_could_not_be_counted_is_a_remark(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = _core.counters() | {"uncounted_allocations_total": 3}
    monkeypatch.setattr(_core, "counters", lambda: counters)
    assert saver.ledger().remarks == ("3 allocations of libraries could not be counted, because host memory was short.",)


def test_the_uuid_is_unknown(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: int) -> str:
        raise errors.DriverError("cuDeviceGetUuid")

    monkeypatch.setattr(_core, "device_info", refuse)
    ledger = saver.ledger()[0]
    assert sizes(ledger)["processes"] == 100 * MIB
    assert "the UUID of device 0 is not known" in ledger.of("processes")[0].note
    assert nvml.asked == []


def test_what_nccl_keeps_is_a_remark(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taking, "what_stays", lambda: "The NCCL communicator keeps its memory.")
    ledger = saver.ledger()
    assert ledger.remarks == ("The NCCL communicator keeps its memory.",)
    assert str(ledger).splitlines()[-1] == "The NCCL communicator keeps its memory."


def test_it_makes_no_call_that_allocates_or_waits(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, simulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    monkeypatch.setattr(taking, "measure_context_bytes", lambda *_: pytest.fail("a child process"))
    fake_torch.calls.clear()
    made = {name: simulator.calls(name) for name in ("cuMemCreate", "cuMemAlloc_v2", "cuCtxSynchronize")}
    assert sizes(saver.ledger()[0])["managed"] == 2 * MIB
    assert {name: simulator.calls(name) for name in made} == made
    assert fake_torch.calls == []


def test_while_another_thread_pauses(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]
) -> None:
    allocate(saver, fake_torch)
    inside, leave = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        inside.set()
        assert leave.wait(60)

    with saver.region("c", enable_cpu_backup=True):
        fake_torch.allocate(2 * MIB)
    thread = threading.Thread(target=_core.pause, args=(("c",), None), kwargs={"progress": hold})
    thread.start()
    try:
        assert inside.wait(60)
        ledger = saver.ledger()[0]
    finally:
        leave.set()
        thread.join()
    assert sizes(ledger)["managed"] == 14 * MIB
    assert "a pause or resume is under way" in ledger.of("managed")[0].note
    assert sizes(saver.ledger()[0])["managed"] == 12 * MIB
    assert saver.ledger()[0].of("managed")[0].note == ""


def test_the_context_is_measured_in_a_child(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    nvml: FakeNvml,
    memory: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[int, str]] = []

    def measure(device: int, uuid: str) -> int:
        measured.append((device, uuid))
        return 30 * MIB

    monkeypatch.setattr(taking, "measure_context_bytes", measure)
    ledger = saver.ledger(measure_context=True)[0]
    assert (sizes(ledger)["context"], sizes(ledger)["processes"]) == (30 * MIB, 70 * MIB)
    nvml.says = [DeviceProcess(os.getpid(), 10 * MIB)]
    assert sizes(saver.ledger(measure_context=True)[0])["context"] == 10 * MIB
    assert measured == [(0, "GPU-0")]


def test_what_a_child_process_takes(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_context_bytes(0, "") == 0  # a simulated context takes no memory
    assert measure_context_bytes(0, _core.device_info(1).uuid) == 0
    free = iter((700 * MIB, 650 * MIB, 640 * MIB, 650 * MIB))
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((next(free), 1024 * MIB)))
    assert measure_context_bytes(0, "") == 50 * MIB
    assert measure_context_bytes(0, "") == 0  # another process has freed memory meanwhile


def test_the_child_does_nothing_else(simulator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With TMS_EVENTS_DIR and the like the program's sitecustomize imports this package. And if the driver fails, the child
    ends."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert measure_context_bytes(0, "") == 0
    assert not (tmp_path / "imported").exists()
    children: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        children.append(real(*arguments, **options))
        return children[-1]

    def fail(_device: int) -> _core.DeviceMemory:
        if children:
            raise errors.DriverError("the device is lost", operation="ledger")
        return _core.DeviceMemory((700 * MIB, 1024 * MIB))

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(_core, "device_memory", fail)
    with pytest.raises(errors.DriverError, match="the device is lost"):
        measure_context_bytes(0, "")
    assert [child.returncode for child in children] == [0]


def test_a_child_process_that_makes_no_context(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", "/nonexistent/libcuda.so.1")
    with pytest.raises(errors.DriverError, match=r"context of device 1 could not .*: OSError: /nonexistent/libcuda"):
        measure_context_bytes(1, "")


def test_arguments(saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.ledger("gpu")  # type: ignore[arg-type]
    assert module.ledger.__func__ is TorchMemorySaver.ledger
