"""Idle and retired pools, how full a pool is, and how it ends."""
