"""Guards the doctor's ledger: in words, as JSON, and one sentence where there is no GPU or no room for a context."""

from __future__ import annotations

import json

import pytest
from processes import Program

from torch_memory_saver import _core, errors
from torch_memory_saver.observe._doctor import doctor
from torch_memory_saver.observe._doctor.check import Check, ok

MIB = 1 << 20


def test_in_words(command: Program) -> None:
    done = command(
        "simulate", "--devices", "2", "--memory", "1GiB", "--", "python", "-m", "torch_memory_saver", "doctor", "--ledger"
    )
    tables = done.stdout.split("\n\n")[-2:]
    assert [table.split(maxsplit=2)[:2] for table in tables] == [["device", "0"], ["device", "1"]]
    assert all("not attributed" in table and "1024.0" in table for table in tables)


def test_as_json(command: Program) -> None:
    done = command(
        "simulate", "--memory", "1GiB", "--", "python", "-m", "torch_memory_saver", "doctor", "--ledger", "--json"
    )
    result = json.loads(done.stdout)
    (device,) = result["ledger"]["devices"]
    assert device["total_bytes"] == 1024 * MIB and result["failures"] == []
    assert sum(line["bytes"] or 0 for line in device["lines"]) == device["used_bytes"]
    assert {check["name"] for check in result["checks"]} > {"ptrace_scope"}


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise errors.DriverError("there is no driver")

    monkeypatch.setattr(_core, "device_count", refuse)
    checks = {"a group": [Check("check", lambda: ok("it is so"))]}
    sentence = "there is no ledger: there is no driver"
    assert doctor.run_doctor(as_json=False, with_ledger=True, groups=checks) == 1
    assert capsys.readouterr().err == f"{sentence}\n"
    assert doctor.run_doctor(as_json=True, with_ledger=True, groups=checks) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ledger"] is None and result["failures"] == [sentence]


def test_a_device_without_room_for_a_context(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(device: int) -> _core.DeviceMemory:
        raise errors.OutOfMemoryError(f"no memory on {device}")

    monkeypatch.setattr(_core, "device_count", lambda: 1)
    monkeypatch.setattr(_core, "active_devices", lambda: 0)
    monkeypatch.setattr(_core, "device_memory", refuse)
    assert doctor.print_ledger() == 1
    printed = capsys.readouterr()
    assert printed.err == "device 0 has no ledger: no memory on 0\n"
    assert printed.out == "no device is in use by this process\n"
