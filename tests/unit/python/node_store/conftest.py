"""Each test has a folder of the shared store of its own."""

from made_store import made, memory

__all__ = ["made", "memory"]
