"""The first paragraph of a report: what failed, who holds most, and what to do about it."""

from __future__ import annotations

from torch_memory_saver import _core
from torch_memory_saver._diagnostics.out_of_memory.account import Account, amount
from torch_memory_saver._diagnostics.out_of_memory.failure import PYTORCH, Failure
from torch_memory_saver.reports.ledger import LedgerLine, LedgerPart

__all__ = ["summarize"]

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


def summarize(failure: Failure, account: Account) -> str:
    """The paragraph, as one line."""
    return " ".join(
        [_what(failure, account), *([account.sentence.strip()] if account.sentence else []), *_advice(failure, account)]
    )


def _what(failure: Failure, account: Account) -> str:
    ledger = account.of_device
    free = "" if ledger is None else f", of which {amount(ledger.free_bytes)} of {amount(ledger.total_bytes)} are free"
    device = "a device" if failure.device is None else f"device {failure.device}"
    if failure.operation == "resume":
        return f"A resume of {_tags(failure)} needs {amount(failure.needed_bytes)} of {device}{free}."
    who = "PyTorch" if failure.source == PYTORCH else "An allocation"
    where = f" in a region with {_tags(failure)}" if failure.tags else ""
    return f"{who} requested {amount(failure.requested_bytes)} of {device}{where}{free}."


def _tags(failure: Failure) -> str:
    if failure.tags is None:
        return "all tags"
    return ("tag " if len(failure.tags) == 1 else "tags ") + ", ".join(f"'{tag}'" for tag in failure.tags)


def _advice(failure: Failure, account: Account) -> list[str]:
    """What to do, in sentences; the most certain first."""
    ledger, largest = account.of_device, account.largest
    if ledger is None:
        return [f"Who holds it is not known: {account.why_not}."]
    if failure.needed_bytes > ledger.total_bytes:
        return ["The device is too small for that, whoever holds its memory: request less, or use more devices."]
    sentences = []
    if failure.allowed_bytes is not None and failure.allowed_bytes < ledger.total_bytes:
        sentences.append(
            f"PyTorch itself is limited to {amount(failure.allowed_bytes)} by torch.cuda.set_per_process_memory_fraction(). "
            "Its paused memory counts against that limit as well."
        )
    missing = failure.needed_bytes - ledger.free_bytes
    margin = _core.get_memory_margin() if failure.operation == "allocate" and failure.tags else 0
    if margin and missing + margin > 0:
        sentences.append(
            f"memory_margin_bytes keeps {amount(margin)} of each device free of managed memory. Lower it if need be."
        )
    if missing <= 0 and not sentences:
        sentences.append("That much is free now: another thread or process has released memory since.")
    if account.slack_sentence:
        sentences.append(account.slack_sentence.strip())
    if largest is not None and largest.holder != "slack":
        sentences.append(_about(failure, largest))
    return sentences


def _about(failure: Failure, line: LedgerLine) -> str:
    """What to do about a holder."""
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
    """A pause of the largest tag, unless it is the one that needs memory."""
    others = [part for part in parts if part.bytes and part.name not in (failure.tags or ())]
    if not others:
        return ""
    return f', such as pause("{max(others, key=lambda part: part.bytes or 0).name}")'
