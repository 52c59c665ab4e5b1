"""Guards which arguments each release of PyTorch gets, and what is reported of them."""

from __future__ import annotations

from typing import Any

import pytest
from recording_torch import SIGNATURES, RecordingTorch

from torch_memory_saver._torch.binding import history, layer
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError, TorchUnavailableError
from torch_memory_saver.observe.memory import record_history, stop_history

WITH_MODES = [release for release in SIGNATURES if release != "2.0.1"]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has recorded nothing."""
    monkeypatch.setattr(history, "_recorder", history._Recorder())


def install(monkeypatch: pytest.MonkeyPatch, release: str, devices: int = 1) -> RecordingTorch:
    torch = RecordingTorch(release, devices)
    monkeypatch.setattr(layer, "require_module", lambda: torch)
    monkeypatch.setattr(layer, "imported", lambda: torch)
    return torch


@pytest.mark.parametrize("release", WITH_MODES)
def test_the_defaults_are_bounded_and_record_python_stacks(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, release, devices=2)
    done = record_history()
    wanted: dict[str, Any] = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 100_000}
    if release == "2.14.0":
        wanted["record_pinned_host_memory"] = True
    assert torch.calls == [wanted]
    assert done.arguments == wanted
    assert (done.mode, done.context, done.stacks, done.max_entries) == ("all", "alloc", "python", 100_000)
    assert done.devices == (0, 1)
    assert done.host is (release == "2.14.0")
    assert done.unsupported == (() if release == "2.14.0" else ("record_host",))
    assert done.torch_version == release


@pytest.mark.parametrize("devices", [1, 3])
def test_torch_2_0_is_called_for_each_device(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.0.1", devices)
    done = record_history(500)
    wanted = {
        "enabled": True,
        "record_context": True,
        "trace_alloc_max_entries": 500,
        "trace_alloc_record_context": True,
    }
    assert torch.calls == [wanted | {"device": device} for device in range(devices)]
    assert done.devices == tuple(range(devices))
    assert (done.mode, done.max_entries) == ("all", 500)
    assert done.unsupported == ("record_host",)


def test_torch_2_0_keeps_no_history_in_the_mode_state(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.0.1")
    done = record_history(500, mode="state", context="state", stacks="all", record_host=False)
    assert torch.calls == [
        {
            "enabled": True,
            "record_context": True,
            "trace_alloc_max_entries": 1,
            "trace_alloc_record_context": False,
            "_enable_expensive_cpp": True,
            "device": 0,
        }
    ]
    assert (done.mode, done.stacks, done.unsupported) == ("state", "all", ())


@pytest.mark.parametrize("release", list(SIGNATURES))
def test_what_a_release_lacks_is_named(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, release)
    done = record_history(clear_history=True)
    missing = {"2.11.0": ("record_host",), "2.14.0": ()}.get(release, ("record_host", "clear_history"))
    assert done.unsupported == missing
    assert record_history(record_host=False).unsupported == ()


@pytest.mark.parametrize("release", ["2.11.0", "2.14.0"])
def test_clear_history_is_passed_on(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, release)
    record_history(7, mode="state", context="all", stacks="all", clear_history=True, record_host=False)
    assert torch.calls == [
        {"enabled": "state", "context": "all", "stacks": "all", "max_entries": 7, "clear_history": True},
    ]


def test_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, wanted in (
        ("2.0.1", [{"enabled": False, "device": 0}, {"enabled": False, "device": 1}]),
        ("2.11.0", [{"enabled": None}]),
        ("2.14.0", [{"enabled": None}]),
    ):
        torch = install(monkeypatch, release, devices=2)
        record_history()
        assert history.current_history() is not None
        torch.calls.clear()
        stop_history()
        assert torch.calls == wanted, release
        assert history.current_history() is None


def test_stopping_without_torch_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "imported", lambda: None)
    stop_history()


@pytest.mark.parametrize("release", ["2.0.1", "2.11.0"])
def test_whether_it_records(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, release)
    assert not history.is_recording(torch)
    record_history()
    assert history.is_recording(torch)
    stop_history()
    assert not history.is_recording(torch)


def test_a_recording_by_another_caller_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.11.0")
    torch.cuda.memory._record_memory_history("all", max_entries=5)
    assert history.is_recording(torch)
    assert history.current_history() is None


def test_native_frames_may_be_there_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks keep the frames after the recording. PyTorch does not tell what another caller records."""
    torch = install(monkeypatch, "2.11.0")
    assert not history.may_have_native_frames(torch)
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=1)
    assert history.may_have_native_frames(torch)
    record_history()
    assert not history.may_have_native_frames(torch)
    record_history(stacks="all")
    assert history.may_have_native_frames(torch)
    stop_history()
    assert history.may_have_native_frames(torch)


@pytest.mark.parametrize(
    "arguments",
    [{"max_entries": value} for value in (0, -1, True, 1.5, None)]
    + [{name: value} for name in ("mode", "context", "stacks") for value in ("", None, "ALL", 1)],
)
def test_malformed_arguments_change_nothing(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.11.0")
    with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
        record_history(**arguments)
    assert torch.calls == []


def test_a_failure_names_the_call_and_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.11.0")
    torch.failure = RuntimeError("cudaMallocAsync does not yet support recordHistory")
    with pytest.raises(InvalidStateError, match=r"_record_memory_history\(enabled, context, .*does not yet support"):
        record_history()
    assert history.current_history() is None


def test_a_release_without_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, "2.11.0")
    torch.cuda.memory._record_memory_history = lambda enabled, context: torch.calls.append({})
    with pytest.raises(InvalidStateError, match="accepts no limit of entries, only enabled, context"):
        record_history()
    assert torch.calls == []
    del torch.cuda.memory._record_memory_history
    with pytest.raises(TorchUnavailableError, match=r"PyTorch 2\.11\.0 cannot record"):
        record_history()
