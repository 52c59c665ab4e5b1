"""Who holds the memory of the device that ran out, from the ledger, and the words for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._diagnostics.processes.names import command_name
from torch_memory_saver._engine.ledger import take_ledger
from torch_memory_saver._engine.process import pool_store
from torch_memory_saver._torch import layer
from torch_memory_saver._torch.empty_cache import count_idle_bytes
from torch_memory_saver._torch.history import may_have_native_frames
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine

__all__ = ["Account", "amount", "take_account"]

logger = logging.getLogger("torch_memory_saver")

_MIB, _GIB = 1 << 20, 1 << 30
#: Before the number of a process, in the name of a part.
_PID = "pid "
#: How many parts of a line are named.
_MOST_PARTS = 3
_RETURN_SLACK = (
    'pause(tag, backup="host") and resume(tag) return it and keep the contents. Tags with region(runs=False), and processes '
    "with TMS_RUNS=0, have none."
)
#: Who holds a line, in a sentence. A library has its own name.
_HOLDERS = {
    "managed": "managed memory of this process that is resident",
    "slack": "slack of this process",
    "deferred": "freed memory of this process that waits for the end of a capture",
    "torch": "PyTorch in this process, outside of regions",
    "context": "the context of this process, with its modules",
    "processes": "other processes",
    "unattributed": "something that is not attributed",
}


@dataclass(frozen=True)
class Account:
    """What is known of the device at the failure.

    Attributes:
        device: CUDA ordinal; None if the failure has none.
        ledger: None if it could not be taken.
        why_not: Why.
        idle_sentence: What ``empty_cache()`` would return of the device, as a sentence after a space; "" if nothing.
    """

    device: int | None
    ledger: Ledger | None
    why_not: str = ""
    idle_sentence: str = ""

    @property
    def of_device(self) -> DeviceLedger | None:
        """The ledger of the device."""
        return None if self.ledger is None or self.device is None else self.ledger[self.device]

    @property
    def largest(self) -> LedgerLine | None:
        """The line with the most bytes; None if there is none with any."""
        ledger = self.of_device
        return ledger.largest if ledger is not None and ledger.largest.bytes else None

    @property
    def sentence(self) -> str:
        """The largest holder, as a sentence after a space; "" if it is not known."""
        ledger, line = self.of_device, self.largest
        if ledger is None or line is None:
            return ""
        return (
            f" The largest holder of device {ledger.device} is {holder_name(line)}: {amount(line.bytes or 0)} of "
            f"{amount(ledger.total_bytes)}{_parts_of(line)}."
        )

    @property
    def slack_sentence(self) -> str:
        """What of the device is slack, and what returns it, as a sentence after a space; "" if nothing is. Messages of the
        native core have their own."""
        ledger = self.of_device
        lines = () if ledger is None else ledger.of("slack")
        return "".join(
            f" {amount(line.bytes or 0)} of device {self.device} are slack, which freed allocations have left with their "
            f"tags{_parts_of(line)}: {_RETURN_SLACK}"
            for line in lines
        )

    def device_part(self) -> dict[str, int] | None:
        """The part of the report about the device: free and total bytes now."""
        if self.device is None:
            return None
        ledger = self.of_device
        if ledger is not None:
            return {"device": self.device, "free_bytes": ledger.free_bytes, "total_bytes": ledger.total_bytes}
        memory = _core.device_memory(self.device)
        return {"device": self.device, "free_bytes": memory.free, "total_bytes": memory.total}

    def ledger_part(self) -> dict[str, Any]:
        """The ledger as plain data.

        Raises:
            RuntimeError: There is none. The text says why.
        """
        if self.ledger is None:
            raise RuntimeError(self.why_not)
        return self.ledger.as_dict()


def take_account(device: int | None) -> Account:
    """Of a device; of none, if it is None. Raises no Exception."""
    if device is None:
        return Account(None, None, "the failure names no device")
    idle = idle_sentence(device)
    try:
        return Account(device, take_ledger(device), idle_sentence=idle)
    except Exception as error:  # whatever it is, the rest of the report is worth having
        return Account(device, None, f"{type(error).__name__}: {error}", idle)


def idle_sentence(device: int) -> str:
    """Return what ``empty_cache()`` would return of the device, as a sentence after a space; "" if nothing, or if it cannot
    be found out. Never raises an Exception."""
    try:
        torch = layer.in_use()
        if torch is None or may_have_native_frames(torch.torch):  # then a list of segments takes seconds
            return ""
        idle = count_idle_bytes(torch, pool_store, device)
    except Exception as error:  # the rest of the message is worth having
        logger.debug("the idle memory of device %d is not known: %s", device, error)
        return ""
    if not idle:
        return ""
    return f" torch_memory_saver.empty_cache() would return {amount(idle)} of idle managed memory of device {device}."


def holder_name(line: LedgerLine) -> str:
    """Who holds the memory of a line, for a sentence."""
    return line.name if line.holder == "processes" else _HOLDERS.get(line.holder, line.name)


def _parts_of(line: LedgerLine) -> str:
    """The largest parts of a line, in brackets after a space; "" without parts."""
    parts = sorted((part for part in line.parts if part.bytes), key=lambda part: -(part.bytes or 0))
    named = ", ".join(f"{_part_name(line, part.name)}: {amount(part.bytes or 0)}" for part in parts[:_MOST_PARTS])
    more = ", ..." if len(parts) > _MOST_PARTS else ""
    return f" ({named}{more})" if named else ""


def _part_name(line: LedgerLine, name: str) -> str:
    if line.holder in ("managed", "slack", "deferred"):
        return f"tag '{name}'"
    command = command_name(int(name.removeprefix(_PID))) if name.startswith(_PID) else ""
    return f"{name}, {command}" if command else name


def amount(size: int) -> str:
    """A size for a sentence: "1.5 GiB" or "12.0 MiB"."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
