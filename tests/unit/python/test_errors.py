"""Guards the exceptions: how the core makes them, their classes, and that they survive a pickle."""

from __future__ import annotations

import errno
import pickle
import sys
from types import ModuleType

import pytest

from torch_memory_saver import errors

STATUSES = {
    "INVALID_ARGUMENT": errors.InvalidArgumentError,
    "INVALID_STATE": errors.InvalidStateError,
    "NOT_MANAGED": errors.NotManagedError,
    "OUT_OF_DEVICE_MEMORY": errors.OutOfMemoryError,
    "OUT_OF_HOST_MEMORY": errors.OutOfHostMemoryError,
    "BACKUP_IO": errors.BackupIOError,
    "DRIVER": errors.DriverError,
    "DRIVER_UNAVAILABLE": errors.DriverUnavailableError,
    "DEVICE_LOST": errors.DeviceLostError,
    "CAPTURE_IN_PROGRESS": errors.CaptureInProgressError,
    "FORKED": errors.ForkedProcessError,
    "INTERRUPTED": errors.CallInterruptedError,
    "DEVICE_LOCKED": errors.DeviceLockedError,
    "SOMETHING_NEW": errors.TorchMemorySaverError,
}


def make(status: str) -> errors.TorchMemorySaverError:
    return errors.make_error(
        status, "what happened", "pause", "cuMemUnmap", "CUDA_ERROR_X", 7, errno.ENOSPC, 1, 4096, 0x7000, "kv"
    )


@pytest.mark.parametrize("status", STATUSES)
def test_each_status_has_its_class_and_every_detail(status: str) -> None:
    error = make(status)
    assert type(error).__mro__[0] is STATUSES[status] or STATUSES[status] in type(error).__mro__
    assert isinstance(error, errors.TorchMemorySaverError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "what happened"
    details = (error.operation, error.driver_call, error.error_name, error.driver_result, error.os_error)
    assert details == ("pause", "cuMemUnmap", "CUDA_ERROR_X", 7, errno.ENOSPC)
    assert (error.device, error.bytes, error.address, error.tag) == (1, 4096, 0x7000, "kv")


@pytest.mark.parametrize("status", STATUSES)
def test_errors_survive_a_pickle(status: str) -> None:
    error = make(status)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert getattr(copy, "errno", None) == getattr(error, "errno", None)


def test_an_error_of_ranks_survives_a_pickle() -> None:
    error = errors.RanksError("what", operation="ranks.pause", failures={3: "why"}, not_undone=["tag"])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (errors.RanksError, "what", vars(error))
    assert (copy.operation, copy.failures, copy.not_undone) == ("ranks.pause", {3: "why"}, ("tag",))


def test_no_device_is_none() -> None:
    assert errors.make_error("DRIVER", "x", "", "", "", 0, 0, -1, 0, 0, "").device is None


def test_an_empty_message_becomes_the_status() -> None:
    assert str(errors.make_error("DRIVER", "", "", "", "", 0, 0, -1, 0, 0, "")) == "DRIVER"


def test_errors_derive_from_pythons_own() -> None:
    backup = make("BACKUP_IO")
    assert isinstance(backup, OSError)
    assert backup.errno == errno.ENOSPC
    assert isinstance(make("INVALID_ARGUMENT"), ValueError)
    assert isinstance(make("OUT_OF_HOST_MEMORY"), MemoryError)
    assert isinstance(make("DEVICE_LOST"), errors.DriverError)


def test_out_of_memory_is_torchs_if_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class TheirError(RuntimeError):
        pass

    fake = ModuleType("torch")
    fake.OutOfMemoryError = TheirError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    error: object = make("OUT_OF_DEVICE_MEMORY")
    assert isinstance(error, TheirError)
    assert isinstance(error, errors.OutOfMemoryError)
    assert type(error) is type(make("OUT_OF_DEVICE_MEMORY")), "the class is made once"
    pickled = pickle.dumps(error)
    assert isinstance(pickle.loads(pickled), TheirError)
    monkeypatch.delitem(sys.modules, "torch")
    assert type(pickle.loads(pickled)) is errors.OutOfMemoryError, "the receiver may have no torch"


def test_a_torch_without_the_class_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert type(make("OUT_OF_DEVICE_MEMORY")) is errors.OutOfMemoryError


def test_a_class_of_the_program_s_can_be_pickled() -> None:
    class Theirs(errors.DriverError):
        pass

    copied = pickle.loads(pickle.dumps(Theirs("broken", device=1)))
    assert type(copied) is errors.DriverError
    assert (str(copied), copied.device) == ("broken", 1)
