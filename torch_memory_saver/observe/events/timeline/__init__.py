"""The timeline: the logs of several processes as one HTML page, which needs no network.

levels.py computes what a process held over time. merge.py finds the processes that share a machine or a GPU. html/ makes the
page. files.py reads the logs and writes the page.

The modules are pure except for files.py. They import no torch, and use no GPU.
"""

from torch_memory_saver.observe.events.timeline.files import read_logs, write_timeline

__all__ = ["read_logs", "write_timeline"]
