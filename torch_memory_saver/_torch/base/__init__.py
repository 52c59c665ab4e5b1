"""Parts that need no PyTorch: steps, the garbage collector, settings of regions in the native core."""
