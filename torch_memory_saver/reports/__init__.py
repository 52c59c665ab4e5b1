"""What the calls of the saver return: plain frozen values, which print as tables."""

from torch_memory_saver.reports.freshness import FreshReport, UnwrittenBlock
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine, LedgerPart
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport, TransitionReport
from torch_memory_saver.reports.usage import Allocation, CallTotals, PreservedBlock, Stats, Usage

__all__ = [
    "Allocation",
    "CallTotals",
    "DeviceLedger",
    "FreshReport",
    "Ledger",
    "LedgerLine",
    "LedgerPart",
    "PauseReport",
    "PreservedBlock",
    "ResumeReport",
    "Stats",
    "TransitionReport",
    "UnwrittenBlock",
    "Usage",
]
