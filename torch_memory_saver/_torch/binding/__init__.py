"""PyTorch's functions: finding them, captures, releases, expandable segments, the history of allocations."""
