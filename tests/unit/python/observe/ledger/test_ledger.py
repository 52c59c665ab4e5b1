"""Guards the ledger: its lines add up to what the driver says, whatever the sources say, and it changes nothing."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest
from fake_torch import FakeTorch
from ledger_sources import HOLDERS, MIB, FakeNvml, allocate, sizes
from recorded_hooks import Recorder

import torch_memory_saver as module
from torch_memory_saver import TorchMemorySaver, _core, errors
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.observe._ledger import sources as taking
from torch_memory_saver.observe._nvml import DeviceProcess
from torch_memory_saver.reports.ledger import LedgerPart


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
    assert "without the preload library" in library.note
    assert processes.parts == (LedgerPart("pid 1", 20 * MIB), LedgerPart("pid 2", 21 * MIB))
    assert nvml.queried == ["GPU-0"]
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


def test_slack_has_a_line_and_is_attributed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int], hooks: Recorder
) -> None:
    allocate(saver, fake_torch)
    hooks.make_slack("w")
    nvml.says = [DeviceProcess(os.getpid(), 73 * MIB), DeviceProcess(2, 25 * MIB)]
    ledger = saver.ledger()[0]
    (managed,), (slack,), (context,) = (ledger.of(holder) for holder in ("managed", "slack", "context"))
    assert [line.holder for line in ledger.lines] == ["managed", "slack", *HOLDERS[1:]]
    assert (managed.bytes, slack.bytes, slack.parts) == (26 * MIB, 2 * MIB, (LedgerPart(hooks.tag("w"), 2 * MIB),))
    assert (context.bytes, ledger.lines[-1].bytes) == (5 * MIB, 2 * MIB), "neither grows by the slack"
    assert "a pause gives it back" in slack.note
    assert "managed, slack (1)" in str(saver.ledger())
    hooks.saver.pause(hooks.tag("w"))
    assert saver.ledger()[0].of("slack") == ()


def test_deferred_frees_have_a_line_and_are_attributed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int], hooks: Recorder
) -> None:
    allocate(saver, fake_torch)
    (address,) = hooks.allocate("w")
    nvml.says = [DeviceProcess(os.getpid(), 59 * MIB), DeviceProcess(2, 39 * MIB)]
    before = saver.ledger()[0]
    identity = _core.capture_begin(None, _core.BACKUP_NONE)
    _core.free(address)
    hooks.addresses.remove(address)
    ledger = saver.ledger()[0]
    (deferred,) = ledger.of("deferred")
    assert (deferred.bytes, deferred.parts) == (2 * MIB, (LedgerPart(hooks.tag("w"), 2 * MIB),))
    assert "when the capture ends" in deferred.note
    assert ledger.of("context") == before.of("context") and ledger.lines[-1] == before.lines[-1], "neither grows by it"
    _core.capture_end(identity)
    assert saver.ledger()[0].of("deferred") == ()


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


def test_a_ledger_is_json_and_a_table(
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
    assert any(line.startswith("(1) Not counted") for line in lines)
    assert max(map(len, lines)) <= 80


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
    assert nvml.queried == []


def test_a_ledger_makes_no_call_that_allocates_or_waits(
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


def test_arguments(saver: TorchMemorySaver, fake_torch: FakeTorch, nvml: FakeNvml, memory: dict[int, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        saver.ledger("gpu")  # type: ignore[arg-type]
    assert module.ledger.__func__ is TorchMemorySaver.ledger
