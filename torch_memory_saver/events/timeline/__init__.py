"""The timeline: the logs of several processes as one HTML page, which needs no network.

levels.py has what a process held over time, merge.py which processes share a machine and a GPU, and page/ shows them.
files.py reads the logs and writes the page.

Pure except for files.py. Imports no torch, and uses no GPU.
"""

from torch_memory_saver.events.timeline.files import read_logs, write_timeline

__all__ = ["read_logs", "write_timeline"]
