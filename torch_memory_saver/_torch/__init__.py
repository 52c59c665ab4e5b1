"""PyTorch: finding it, routing its allocations to pools, graphs, live blocks, and what it needs around a pause."""
