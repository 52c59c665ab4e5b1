"""What ran out of memory, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torch_memory_saver import _core
from torch_memory_saver.errors import OutOfMemoryError

__all__ = ["PYTORCH", "THIS_PACKAGE", "Failure", "failure_of_error", "failure_of_torch"]

#: Whose exception the program gets.
THIS_PACKAGE, PYTORCH = "torch_memory_saver", "PyTorch"


@dataclass(frozen=True)
class Failure:
    """One out-of-memory error.

    Attributes:
        source: Whose exception the program gets: "torch_memory_saver" or "PyTorch".
        operation: "resume" or "allocate".
        device: CUDA ordinal; None if it is not known.
        requested_bytes: What the call that failed requested: of a resume, one allocation.
        needed_bytes: What the operation needs on the device: of a resume, everything that it would map there.
        tags: What a resume selects; None: every tag. Of an allocation: the tag of the region, or nothing outside of regions.
        driver_call: That failed; "" if it is not known.
        error_name: Of the driver.
        message: Of the exception, if there is one by now.
        allowed_bytes: What PyTorch may use of the device at most: less than the device has, if the program has set a
            fraction. None if PyTorch was not asked.
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
    """Of this package's own exception. `tags`: what the resume selects."""
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
    """Of an allocation by PyTorch, in a region or outside, as its observers are told of it."""
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
    """What a resume of the tags has to map on the device. It is over: what it did was undone."""
    return sum(
        row.reserved_bytes
        for row in _core.segments()
        if row.device == device and row.state != _core.STATE_ACTIVE and (tags is None or row.tag in tags)
    )
