"""The comparison of snapshots: growth, drift and fragmentation, in a table and on a page.

processes.py finds the snapshots of one process, and steps.py those of one point of each step. growth.py, drift.py and
fragmentation.py each find one thing. comparison.py combines their results. table.py and html/ show them. No module here
needs PyTorch.
"""

from .comparison import Comparison, compare
from .drift import Drift
from .fragmentation import DeviceUsage, Fragmentation, Holder
from .growth import GrowthKind, StackGrowth
from .processes import Process

__all__ = [
    "Comparison",
    "DeviceUsage",
    "Drift",
    "Fragmentation",
    "GrowthKind",
    "Holder",
    "Process",
    "StackGrowth",
    "compare",
]
