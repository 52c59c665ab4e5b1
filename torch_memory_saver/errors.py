"""The exceptions that this package raises.

All derive from :class:`TorchMemorySaverError`, which is a ``RuntimeError``. The attributes contain the details of the
failure from the native core. Attributes that do not apply are ``""``, ``0`` or, for ``device``, ``None``. The instances can
be pickled, so that a worker process can send one to its parent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

__all__ = [
    "BackupIOError",
    "CallInterruptedError",
    "CaptureInProgressError",
    "DeviceLockedError",
    "DeviceLostError",
    "DriverError",
    "DriverUnavailableError",
    "ForkedProcessError",
    "InvalidArgumentError",
    "InvalidStateError",
    "NotManagedError",
    "OutOfHostMemoryError",
    "OutOfMemoryError",
    "RanksError",
    "TorchMemorySaverError",
    "TorchUnavailableError",
]

_DETAILS = ("operation", "driver_call", "error_name", "driver_result", "os_error", "device", "bytes", "address", "tag")


class TorchMemorySaverError(RuntimeError):
    """The base class of this package's exceptions.

    Attributes:
        operation: The operation that failed, such as ``"pause"`` or ``"allocate"``.
        driver_call: The driver or system call that failed, such as ``"cuMemCreate"``.
        error_name: The driver's name of the error, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        driver_result: The driver's number of the error (a ``CUresult``); 0 if no driver call failed.
        os_error: The ``errno`` of a failed system call; 0 if none failed.
        device: The CUDA ordinal of the device concerned, or None.
        bytes: The bytes requested.
        address: The device address concerned.
        tag: The tag concerned.
    """

    #: The names of the attributes, which a pickle of the error contains.
    _details: ClassVar[tuple[str, ...]] = _DETAILS

    def __init__(
        self,
        message: str = "",
        *,
        operation: str = "",
        driver_call: str = "",
        error_name: str = "",
        driver_result: int = 0,
        os_error: int = 0,
        device: int | None = None,
        bytes: int = 0,
        address: int = 0,
        tag: str = "",
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.driver_call = driver_call
        self.error_name = error_name
        self.driver_result = driver_result
        self.os_error = os_error
        self.device = device
        self.bytes = bytes
        self.address = address
        self.tag = tag

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[str, str, dict[str, Any]]]:
        # The class that is combined with torch's is created on demand and cannot be found by name. The name of its base is
        # enough, because the receiving process creates its own combination. A program's subclass becomes its base here.
        name = next(cls.__name__ for cls in type(self).__mro__ if globals().get(cls.__name__) is cls)
        return _rebuild, (name, str(self), {name: getattr(self, name) for name in self._details})


class InvalidArgumentError(TorchMemorySaverError, ValueError):
    """An argument has a value that the operation does not accept, and nothing was changed."""


class InvalidStateError(TorchMemorySaverError):
    """The operation does not fit the present state, and nothing was changed."""


class NotManagedError(TorchMemorySaverError):
    """The memory was not allocated in a region of this library."""


class OutOfMemoryError(TorchMemorySaverError):
    """The device has too little free memory.

    If PyTorch is loaded, the instance is a ``torch.OutOfMemoryError`` as well. After a failed ``resume`` everything stays
    paused, with its backup, and the same call can be made again; the message names the largest holder of the device, and
    with ``TMS_DEBUG=oom`` the file of a report.
    """


class OutOfHostMemoryError(TorchMemorySaverError, MemoryError):
    """Host memory is short for a backup or for bookkeeping, or the limits of host memory cannot be read.

    The limits cannot be read if the process has too few file descriptors: ``os_error`` is then the system's error number.
    """


class BackupIOError(TorchMemorySaverError, OSError):
    """A file or folder of backups could not be created, written or read.

    ``errno`` is the system's error number.
    """

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message, **details)
        self.errno = self.os_error or None


class DriverError(TorchMemorySaverError):
    """A CUDA driver call failed."""


class DeviceLostError(DriverError):
    """The device's context is in a sticky error: the process must restart before it can use the device again."""


class DriverUnavailableError(TorchMemorySaverError):
    """There is no usable CUDA driver or device, or the driver is too old for virtual memory management."""


class TorchUnavailableError(TorchMemorySaverError):
    """The operation needs a PyTorch that can use CUDA, but none is installed, or it finds no device, or it is too old."""


class CaptureInProgressError(TorchMemorySaverError):
    """A stream capture is active, during which the device must not be synchronised, and nothing was changed."""


class ForkedProcessError(TorchMemorySaverError):
    """This process was forked from one that used the GPU and cannot use the GPU itself: start it with "spawn" instead."""


class CallInterruptedError(TorchMemorySaverError):
    """A caller of the native core cancelled the call, and nothing was changed.

    Python code sees the signal handler's own exception instead (KeyboardInterrupt after Ctrl-C).
    """


class DeviceLockedError(TorchMemorySaverError):
    """The turn of this process did not come until the timeout of ``resume(exclusive=True)``, and everything stays paused."""


class RanksError(TorchMemorySaverError):
    """A pause or resume of all ranks (:mod:`torch_memory_saver.ranks`) has failed, and this rank has undone its part.

    All ranks that have made the call raise this error. On a rank that has failed itself, ``__cause__`` is its own error.

    Attributes:
        failures: Reasons of the failure, by global rank. The dictionary is empty if the store of the process group does not
            answer, so that the ranks could not decide.
        not_undone: Sentences about what this rank could not undo, one for each tag.
    """

    _details = (*_DETAILS, "failures", "not_undone")

    def __init__(
        self,
        message: str = "",
        *,
        failures: Mapping[int, str] | None = None,
        not_undone: Iterable[str] = (),
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.failures = dict(failures or {})
        self.not_undone = tuple(not_undone)


_CLASS_OF_STATUS: dict[str, type[TorchMemorySaverError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "INVALID_STATE": InvalidStateError,
    "NOT_MANAGED": NotManagedError,
    "OUT_OF_DEVICE_MEMORY": OutOfMemoryError,
    "OUT_OF_HOST_MEMORY": OutOfHostMemoryError,
    "BACKUP_IO": BackupIOError,
    "DRIVER": DriverError,
    "DRIVER_UNAVAILABLE": DriverUnavailableError,
    "DEVICE_LOST": DeviceLostError,
    "CAPTURE_IN_PROGRESS": CaptureInProgressError,
    "FORKED": ForkedProcessError,
    "INTERRUPTED": CallInterruptedError,
    "DEVICE_LOCKED": DeviceLockedError,
}

_out_of_memory_classes: dict[type[BaseException], type[OutOfMemoryError]] = {}


def _out_of_memory_class() -> type[OutOfMemoryError]:
    """Return OutOfMemoryError, combined with torch's class of that name if torch is loaded and has one."""
    theirs = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if not (isinstance(theirs, type) and issubclass(theirs, Exception)):
        return OutOfMemoryError
    combined = _out_of_memory_classes.get(theirs)
    if combined is None:
        combined = type(
            "OutOfMemoryError", (OutOfMemoryError, theirs), {"__module__": __name__, "__doc__": OutOfMemoryError.__doc__}
        )
        _out_of_memory_classes[theirs] = combined
    return combined


def rename_operation(error: TorchMemorySaverError, operation: str) -> None:
    """Name the public call in an error of a query that it has made, also at the beginning of the message."""
    error.args = (f"{operation}: " + str(error).removeprefix(f"{error.operation}: "),)
    error.operation = operation


def add_note(error: BaseException, text: str) -> None:
    """Add a line to what is printed of an exception, where Python can do it."""
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(f"torch_memory_saver: {text}")


def _rebuild(name: str, message: str, details: dict[str, Any]) -> TorchMemorySaverError:
    cls: type[TorchMemorySaverError] = globals()[name]
    return (_out_of_memory_class() if cls is OutOfMemoryError else cls)(message, **details)


def make_error(
    status: str,
    message: str,
    operation: str,
    call: str,
    result_name: str,
    driver_result: int,
    os_error: int,
    device: int,
    bytes: int,
    address: int,
    tag: str,
) -> TorchMemorySaverError:
    """Return the exception for a failure of the native core.

    ``_core`` calls this function with positional arguments.

    Args:
        status: Status code of the core without its prefix, such as ``"OUT_OF_DEVICE_MEMORY"``. An unknown status gives a
            :class:`TorchMemorySaverError`.
        message: Message of the exception. If it is empty, the status is the message.
        operation: Operation that failed, such as ``"pause"``.
        call: Driver or system call that failed, such as ``"cuMemCreate"``.
        result_name: Name that the driver gives the error; "" if no driver call failed.
        driver_result: The driver's number of the error; 0 if no driver call failed.
        os_error: The ``errno`` of a failed system call; 0 if none failed.
        device: CUDA ordinal, or -1 if no device is concerned.
        bytes: Number of bytes requested.
        address: Device address concerned.
        tag: Tag concerned.
    """
    cls = _CLASS_OF_STATUS.get(status, TorchMemorySaverError)
    return (_out_of_memory_class() if cls is OutOfMemoryError else cls)(
        message or status,
        operation=operation,
        driver_call=call,
        error_name=result_name,
        driver_result=driver_result,
        os_error=os_error,
        device=None if device < 0 else device,
        bytes=bytes,
        address=address,
        tag=tag,
    )
