"""The holders of the memory of a device that ran out, from the ledger, and the sentences about it: what failed, who holds
most, and what to do.

The functions are called on the thread that fails, without a lock. They raise no Exception: unknown facts are missing in the
text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._services import count_idle_bytes, layer, may_have_native_frames
from torch_memory_saver._text import binary_size
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.observe._ledger.sources import take_ledger
from torch_memory_saver.observe._out_of_memory.failure import PYTORCH, Failure
from torch_memory_saver.observe._processes.names import command_name
from torch_memory_saver.observe._processes.shared_pages import Page, read_pages
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine, LedgerPart

__all__ = ["Account", "idle_sentence", "limit_sentence", "paused_sentence", "summarize", "take_account"]
logger = logging.getLogger("torch_memory_saver")

#: Before the number of a process, in the name of a part.
_PID = "pid "
#: The number of parts of a line that are named.
_MAX_PARTS = 3
_RETURN_SLACK = (
    'pause(tag, backup="host") and resume(tag) return it and keep the contents. Tags with region(runs=False), and processes '
    "with TMS_RUNS=0, have none."
)
#: The holder of a line, as part of a sentence. A library has its own name.
_HOLDERS = {
    "managed": "managed memory of this process that is resident",
    "slack": "slack of this process",
    "deferred": "freed memory of this process that waits for the end of a capture",
    "torch": "PyTorch in this process, outside of regions",
    "context": "the context of this process, with its modules",
    "processes": "other processes",
    "unattributed": "something that is not attributed",
}
_CACHE = (
    "Most of that is cached, not in use: call torch_memory_saver.empty_cache(). What it leaves are free parts of segments; "
    "PYTORCH_ALLOC_CONF=expandable_segments:True avoids those."
)
_ALL_TAGS = 'Resume only the tags that are needed now, such as resume("weights"), or make them smaller.'
_TENSORS = "Delete tensors that are not needed, or allocate them in a region, so that they can be paused."
_LIBRARY = (
    "See which of its buffers can be released while they are not needed: on_pause() calls the program's own code for that, "
    "and nccl.suspend_on_pause() does it for NCCL communicators where PyTorch and NCCL can."
)
_CONTEXT = "Each process needs a context on each GPU that it uses: let fewer processes use this one."
_DEFERRED = "End the capture, and allocate again. Free before a capture what is not needed during it."
_NOT_ATTRIBUTED = "Compare with nvidia-smi: the driver, the display and processes in other containers count here."


@dataclass(frozen=True)
class Account:
    """The memory of the device when the allocation failed.

    Attributes:
        device: CUDA ordinal; None if the failure names no device.
        ledger: Ledger of the device; None if it could not be taken.
        why_not: Reason why there is no ledger.
        idle_sentence: Sentence about the memory of the device that ``empty_cache()`` would release; "" if there is none.
        paused_sentence: Sentence about paused memory of the device; "" if there is none.
    """

    device: int | None
    ledger: Ledger | None
    why_not: str = ""
    idle_sentence: str = ""
    paused_sentence: str = ""

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
        """The largest holder, as a sentence; "" if it is not known."""
        ledger, line = self.of_device, self.largest
        if ledger is None or line is None:
            return ""
        return (
            f"The largest holder of device {ledger.device} is {holder_name(line)}: {binary_size(line.bytes or 0)} of "
            f"{binary_size(ledger.total_bytes)}{_parts_of(line, ledger.device)}."
        )

    @property
    def slack_sentence(self) -> str:
        """A sentence about the device's slack and how to give it back; "" if there is none. Messages of the native core have
        a sentence of their own."""
        ledger = self.of_device
        lines = () if ledger is None else ledger.of("slack")
        return " ".join(
            f"{binary_size(line.bytes or 0)} of device {self.device} are slack: memory of freed allocations that stays with "
            f"its tag{_parts_of(line, self.device)}. {_RETURN_SLACK}"
            for line in lines
        )

    def device_part(self) -> dict[str, int] | None:
        """Return the part of the report about the device: free and total bytes now."""
        if self.device is None:
            return None
        ledger = self.of_device
        if ledger is not None:
            return {"device": self.device, "free_bytes": ledger.free_bytes, "total_bytes": ledger.total_bytes}
        memory = _core.device_memory(self.device)
        return {"device": self.device, "free_bytes": memory.free, "total_bytes": memory.total}

    def ledger_part(self) -> dict[str, Any]:
        """Return the ledger as plain data.

        Raises:
            RuntimeError: There is no ledger. The message gives the reason.
        """
        if self.ledger is None:
            raise RuntimeError(self.why_not)
        return self.ledger.as_dict()


def take_account(device: int | None) -> Account:
    """Return the account of `device` (empty if None). Raises no Exception."""
    if device is None:
        return Account(None, None, "the failure names no device")
    idle, paused = idle_sentence(device), paused_sentence(device)
    try:
        return Account(device, take_ledger(device), "", idle, paused)
    except Exception as error:  # whatever it is, the rest of the report is worth having
        return Account(device, None, f"{type(error).__name__}: {error}", idle, paused)


def summarize(failure: Failure, account: Account) -> str:
    """Return the summary of the report, a paragraph on one line."""
    paused = account.paused_sentence if failure.source == PYTORCH else ""
    return " ".join([*filter(None, (_what(failure, account), paused, account.sentence)), *_advice(failure, account)])


def idle_sentence(device: int) -> str:
    """Return what ``empty_cache()`` would give back of the device, as a sentence; "" if nothing, or if it cannot be found
    out. Never raise an Exception."""
    try:
        torch = layer.in_use()
        if torch is None or may_have_native_frames(torch.torch):  # then a list of segments takes seconds
            return ""
        idle = count_idle_bytes(torch, device)
    except Exception as error:  # the rest of the message is worth having
        logger.debug("the idle memory of device %d is not known: %s", device, error)
        return ""
    if not idle:
        return ""
    return f"torch_memory_saver.empty_cache() would give back {binary_size(idle)} of idle managed memory of device {device}."


def paused_sentence(device: int) -> str:
    """Return a sentence about the paused memory of the device, which PyTorch's text counts as allocated; "" if there is
    none."""
    rows = [row for row in _core.usage(None, device) if row.tag is not None and row.paused_bytes]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row.paused_bytes)
    more = ", ..." if len(rows) > _MAX_PARTS else ""
    return (
        f"PyTorch counts {binary_size(sum(row.paused_bytes for row in rows))} of paused memory as allocated "
        f"({_tags(tuple(str(row.tag) for row in rows[:_MAX_PARTS]))}{more}), but it holds no memory of device {device}."
    )


def limit_sentence(device: int, allowed: int) -> str:
    """Return a sentence about a limit of PyTorch's that paused memory of the device counts against; "" if there is none.

    Args:
        device: CUDA ordinal.
        allowed: The bytes of the device that PyTorch may use.
    """
    has_paused = any(row.device == device and row.paused_bytes for row in _core.usage(None))
    return _limit(allowed) if has_paused and allowed < _core.device_memory(device).total else ""


def _limit(allowed: int) -> str:
    return (
        f"PyTorch itself is limited to {binary_size(allowed)} by torch.cuda.set_per_process_memory_fraction(). Its paused "
        "memory counts against that limit as well."
    )


def holder_name(line: LedgerLine) -> str:
    """Return the name of the holder of a line's memory, for a sentence."""
    return line.name if line.holder == "processes" else _HOLDERS.get(line.holder, line.name)


def _parts_of(line: LedgerLine, device: int | None) -> str:
    """Return the largest parts of a line, in brackets after a space; "" without parts."""
    parts = sorted((part for part in line.parts if part.bytes), key=lambda part: -(part.bytes or 0))
    named = ", ".join(
        f"{_part_name(line, part.name, device)}: {binary_size(part.bytes or 0)}" for part in parts[:_MAX_PARTS]
    )
    more = ", ..." if len(parts) > _MAX_PARTS else ""
    return f" ({named}{more})" if named else ""


def _part_name(line: LedgerLine, name: str, device: int | None) -> str:
    if line.holder in ("managed", "slack", "deferred"):
        return f"tag '{name}'"
    if not name.startswith(_PID):
        return name
    pid = int(name.removeprefix(_PID))
    return ", ".join(text for text in (name, command_name(pid), _resident_tags(pid, device)) if text)


def _resident_tags(pid: int, device: int | None) -> str:
    """Return the resident tags of a process on the device, from its shared page, the largest first; "" if none is known."""
    pages = [page for page in read_pages().pages if page.pid == pid and not page.foreign]
    try:
        uuid = _core.device_info(device).uuid if pages and device is not None else ""
    except TorchMemorySaverError:  # of an old driver
        return ""
    rows = [
        row for page in pages for row in page.rows if row.tag and row.resident_bytes and row.device in _ordinals(page, uuid)
    ]
    rows.sort(key=lambda row: -row.resident_bytes)
    more = ", ..." if len(rows) > _MAX_PARTS else ""
    return "with " + _tags(tuple(row.tag for row in rows[:_MAX_PARTS])) + more if rows else ""


def _ordinals(page: Page, uuid: str) -> list[int]:
    return [ordinal for ordinal, device in enumerate(page.devices) if device.uuid == uuid]


def _what(failure: Failure, account: Account) -> str:
    ledger = account.of_device
    free = (
        ""
        if ledger is None
        else f", of which {binary_size(ledger.free_bytes)} of {binary_size(ledger.total_bytes)} are free"
    )
    device = "a device" if failure.device is None else f"device {failure.device}"
    if failure.operation == "resume":
        return f"A resume of {_tags(failure.tags)} needs {binary_size(failure.needed_bytes)} of {device}{free}."
    who = "PyTorch" if failure.source == PYTORCH else "An allocation"
    where = f" in a region with {_tags(failure.tags)}" if failure.tags else ""
    return f"{who} requested {binary_size(failure.requested_bytes)} of {device}{where}{free}."


def _tags(tags: tuple[str, ...] | None) -> str:
    if tags is None:
        return "all tags"
    return ("tag " if len(tags) == 1 else "tags ") + ", ".join(f"'{tag}'" for tag in tags)


def _advice(failure: Failure, account: Account) -> list[str]:
    """Return what to do, in sentences; the most certain first."""
    ledger, largest = account.of_device, account.largest
    if ledger is None:
        return [f"Who holds it is not known: {account.why_not}."]
    if failure.needed_bytes > ledger.total_bytes:
        return ["This is more than the whole memory of the device: request less, or use more devices."]
    sentences = []
    if failure.allowed_bytes is not None and failure.allowed_bytes < ledger.total_bytes:
        sentences.append(_limit(failure.allowed_bytes))
    missing = failure.needed_bytes - ledger.free_bytes
    margin = _core.get_memory_margin() if failure.operation == "allocate" and failure.tags else 0
    if margin and missing + margin > 0:
        sentences.append(
            f"memory_margin_bytes keeps {binary_size(margin)} of each device free of managed memory. Lower it if need be."
        )
    if missing <= 0 and not sentences:
        sentences.append("That much is free now: another thread or process has released memory since.")
    if account.slack_sentence:
        sentences.append(account.slack_sentence)
    if largest is not None and largest.holder != "slack":
        sentences.append(_about(failure, largest))
    return sentences


def _about(failure: Failure, line: LedgerLine) -> str:
    """Return the advice about a holder of memory."""
    if line.holder == "processes":
        wait = " Or let the resume wait for them: resume(timeout=seconds)." if failure.operation == "resume" else ""
        return f"Have them pause or end, or give them another device.{wait}"
    if line.holder == "managed" and failure.tags is None:
        return _ALL_TAGS
    if line.holder == "managed":
        return f"Pause what is not needed now{_example(failure, line.parts)}, or make it smaller."
    if line.holder == "torch":
        sizes = {part.name: part.bytes or 0 for part in line.parts}
        return _CACHE if sizes.get("cached", 0) > sizes.get("in use", 0) else _TENSORS
    return {"library": _LIBRARY, "context": _CONTEXT, "deferred": _DEFERRED}.get(line.holder, _NOT_ATTRIBUTED)


def _example(failure: Failure, parts: tuple[LedgerPart, ...]) -> str:
    """Return an example that pauses the largest tag, except the tags that need memory; "" if there is no such tag."""
    others = [part for part in parts if part.bytes and part.name not in (failure.tags or ())]
    if not others:
        return ""
    return f', such as pause("{max(others, key=lambda part: part.bytes or 0).name}")'
