"""Idle and retired pools, the fill of a pool, and its end."""
