"""The description of an out-of-memory error, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torch_memory_saver import _core
from torch_memory_saver.errors import OutOfMemoryError

__all__ = ["PYTORCH", "THIS_PACKAGE", "Failure", "failure_of_error", "failure_of_torch"]

#: Sources of the exception that the program gets.
THIS_PACKAGE, PYTORCH = "torch_memory_saver", "PyTorch"


@dataclass(frozen=True)
class Failure:
    """One out-of-memory error.

    Attributes:
        source: Source of the exception that the program gets: "torch_memory_saver" or "PyTorch".
        operation: "resume" or "allocate".
        device: CUDA ordinal; None if it is not known.
        requested_bytes: Bytes that the failed call requested. For a resume this is one allocation.
        needed_bytes: Bytes that the operation needs on the device. For a resume this is everything that it would map there.
        tags: For a resume, the tags that it selects, or None for every tag. For an allocation, the tag of the region, or ()
            outside of regions.
        driver_call: Driver call that failed; "" if it is not known.
        error_name: Name of the driver's error; "" if it is not known.
        message: Message of the exception; "" if the exception does not exist yet.
        allowed_bytes: Maximum number of bytes of the device that PyTorch may use. It is less than the size of the device if
            the program has set a fraction. None for an error of this package.
    """

    source: str
    operation: str
    device: int | None
    requested_bytes: int
    needed_bytes: int
    tags: tuple[str, ...] | None
    driver_call: str = ""
    error_name: str = ""
    message: str = ""
    allowed_bytes: int | None = None


def failure_of_error(error: OutOfMemoryError, tags: tuple[str, ...] | None) -> Failure:
    """Return the failure for an exception of this package. `tags` are the tags that the resume selects."""
    return Failure(
        source=THIS_PACKAGE,
        operation=error.operation,
        device=error.device,
        requested_bytes=error.bytes,
        needed_bytes=max(error.bytes, _paused_bytes(tags, error.device)),
        tags=tags,
        driver_call=error.driver_call,
        error_name=error.error_name,
        message=str(error),
    )


def failure_of_torch(device: int, requested: int, allowed: int) -> Failure:
    """Return the failure for an allocation by PyTorch, inside or outside of a region. The arguments are those of PyTorch's
    observers."""
    region = _core.region_current()
    return Failure(
        source=PYTORCH,
        operation="allocate",
        device=device,
        requested_bytes=requested,
        needed_bytes=requested,
        tags=(region.tag,) if region.managed else (),
        allowed_bytes=allowed,
    )


def _paused_bytes(tags: tuple[str, ...] | None, device: int | None) -> int:
    """Return the bytes that a resume of the tags has to map on the device. The failed resume was already undone."""
    return sum(
        row.reserved_bytes
        for row in _core.segments()
        if row.device == device and row.state != _core.STATE_ACTIVE and (tags is None or row.tag in tags)
    )
