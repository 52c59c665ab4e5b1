"""The ledger, which lists who holds the memory of a device.

Its lines add up to the used bytes that the driver reports. The printed ledger has a table for each device, with its notes
below it, and then the remarks as sentences.

The module has only plain frozen values. It imports neither torch nor the native core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_memory_saver._text import mebibytes, table, wrapped

__all__ = ["DeviceLedger", "Ledger", "LedgerLine", "LedgerPart"]

#: Version of the format of :meth:`Ledger.as_dict`. It increases with each change that breaks a reader.
LEDGER_FORMAT = 1


@dataclass(frozen=True)
class LedgerPart:
    """A part of a ledger's line.

    The parts of a line add up to the line.

    Attributes:
        name: Name of the part: a tag for managed memory, slack and deferred frees; "in use" or "cached" for PyTorch's
            memory; a text such as "pid 1234" for other processes.
        bytes: Size in bytes, or None if NVML hides the bytes of a process.
        allocations: Number of allocations, or None if it is not known.
    """

    name: str
    bytes: int | None
    allocations: int | None = None


@dataclass(frozen=True)
class LedgerLine:
    """One holder of a device's memory, with its bytes.

    Attributes:
        holder: "managed" (resident managed memory), "slack" (managed memory of freed allocations, which a pause returns),
            "deferred" (managed memory of frees that wait for the end of a capture), "torch" (ordinary memory that PyTorch
            has reserved), "library" (allocations of one other library of this process), "context" (this process's
            context, with the code of its kernels and all that is not known by name), "processes" (other processes) or
            "unattributed" (the difference to what the driver says).
        name: Name that a table shows, such as the file name of a library.
        bytes: Size in bytes, or None if it is not known. Unknown bytes are part of another line, which the note names. Only
            "unattributed" can be negative, which means that the sources disagree.
        allocations: Number of allocations, or None if it is not known.
        parts: Parts of the line, if they are known.
        note: Remark about the line, in words; "" for none.
    """

    holder: str
    name: str
    bytes: int | None
    allocations: int | None = None
    parts: tuple[LedgerPart, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class DeviceLedger:
    """The memory of one device, in lines that add up to `used_bytes`.

    Attributes:
        device: CUDA ordinal.
        total_bytes, used_bytes: Sizes that the driver reports (``cuMemGetInfo``).
        lines: Lines in the order of :class:`LedgerLine`'s holders. Each holder has one line, except for "slack" and
            "deferred", which have a line only if there is such memory, and "library", which has a line for each other
            library with memory.
    """

    device: int
    total_bytes: int
    used_bytes: int
    lines: tuple[LedgerLine, ...]

    @property
    def free_bytes(self) -> int:
        """The free bytes that the driver reports."""
        return self.total_bytes - self.used_bytes

    def of(self, holder: str) -> tuple[LedgerLine, ...]:
        """Return the lines of a holder, such as "library"."""
        return tuple(line for line in self.lines if line.holder == holder)

    @property
    def largest(self) -> LedgerLine:
        """The line with the most bytes."""
        return max(self.lines, key=lambda line: line.bytes or 0)


@dataclass(frozen=True)
class Ledger:
    """The holders of the memory of each device, which prints as a table.

    Attributes:
        devices: Ledgers of the devices, in order.
        remarks: Sentences about what a pause does not release, such as the memory of NCCL's communicators.
        pid: Id of the process that took the ledger.
        time: Time at which the ledger was taken, in seconds since 1970.
    """

    devices: tuple[DeviceLedger, ...]
    remarks: tuple[str, ...]
    pid: int
    time: float

    def __iter__(self) -> Iterator[DeviceLedger]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, device: int) -> DeviceLedger:
        """Return the ledger of a device, given its CUDA ordinal.

        Raises:
            KeyError: The ledger does not contain the device.
        """
        for ledger in self.devices:
            if ledger.device == device:
                return ledger
        raise KeyError(device)

    def as_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data for ``json.dumps()``.

        The keys are ``format``, ``pid``, ``time``, ``remarks``, and ``devices``, a list with a dict for each device: the
        fields of :class:`DeviceLedger`, of its lines and of their parts.
        """
        fields = dataclasses.asdict(self)
        return {
            "format": LEDGER_FORMAT,
            "pid": self.pid,
            "time": self.time,
            "devices": [_with_lists(device) for device in fields["devices"]],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        return _ledger_table(self)


def _with_lists(device: dict[str, Any]) -> dict[str, Any]:
    lines = [line | {"parts": list(line["parts"])} for line in device["lines"]]
    return device | {"lines": lines}


_NOTHING = "no device is in use by this process"


def _ledger_table(ledger: Ledger) -> str:
    """Return the lines of `print(ledger)`, without a line break at the end."""
    blocks = [_device_table(device) for device in ledger.devices] or [_NOTHING]
    return "\n".join(["\n\n".join(blocks), *ledger.remarks])


def _device_table(device: DeviceLedger) -> str:
    rows = [(f"device {device.device}", "MiB", "allocations")]
    notes: list[str] = []
    for line in device.lines:
        mark = ""
        if line.note:
            notes.append(f"({len(notes) + 1}) {line.note}")
            mark = f" ({len(notes)})"
        rows.append((line.name + mark, mebibytes(line.bytes), _number(line.allocations)))
        rows += [(f"  {part.name}", mebibytes(part.bytes), _number(part.allocations)) for part in line.parts]
    rows.append(("used", mebibytes(device.used_bytes), ""))
    rows.append(("total", mebibytes(device.total_bytes), ""))
    return "\n".join(table(rows) + [line for note in notes for line in wrapped(note, indent="    ")])


def _number(number: int | None) -> str:
    return "" if number is None else str(number)
