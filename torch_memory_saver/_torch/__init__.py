"""PyTorch: finding it, routing its allocations to pools, graphs, live blocks, and the preparation of its pools for a
pause."""
