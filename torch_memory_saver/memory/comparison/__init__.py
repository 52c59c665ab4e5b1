"""Comparing snapshots: growth, drift and fragmentation, in a table and on a page.

processes.py says which snapshots are of one process; growth.py, drift.py and fragmentation.py each find one thing;
comparison.py puts their results together; table.py and page/ show them. No module here needs PyTorch.
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
