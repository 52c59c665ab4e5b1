"""The stock of pools, how full a pool is, and how it ends."""
