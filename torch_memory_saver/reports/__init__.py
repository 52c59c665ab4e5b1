"""The values that the calls of the saver return, which are plain frozen objects.

Statistics, ledgers and reports of unwritten memory print as tables.
"""

from torch_memory_saver._patches import Patch
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
    "Patch",
    "PauseReport",
    "PreservedBlock",
    "ResumeReport",
    "Stats",
    "TransitionReport",
    "UnwrittenBlock",
    "Usage",
]
