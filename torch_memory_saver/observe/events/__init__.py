"""The history of this package's operations: the event ring of the native core, and its exports.

The ring keeps the latest 16384 allocations, frees, pauses and resumes with their phases, and failures. An export contains
the number of dropped events, and the memory that each tag held at its first event, so that levels drawn from it are correct.

Importing this package, or reading events, initialises no driver and no CUDA.
"""

from torch_memory_saver.observe.events.chrome_trace import write_chrome_trace
from torch_memory_saver.observe.events.event_file import load_events, write_events
from torch_memory_saver.observe.events.log import Device, Event, EventLog, Level, events, sample_free_memory
from torch_memory_saver.observe.events.metrics import metrics, write_metrics
from torch_memory_saver.observe.events.timeline import write_timeline

__all__ = [
    "Device",
    "Event",
    "EventLog",
    "Level",
    "events",
    "load_events",
    "metrics",
    "sample_free_memory",
    "write_chrome_trace",
    "write_events",
    "write_metrics",
    "write_timeline",
]
